# SPDX-License-Identifier: Apache-2.0
"""What is asked for becomes types: the best choice there is, sizes that are kept, refusals."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from make import calibrated_models, tiny_checkpoints
from make.refusals import refusals
from qsf.errors import QsfArgumentError, QsfConversionError, QsfIOError
from qsf.file.layout import Dtype, Layout, Role, TensorType, layer_unit, pass_units
from qsf.file.reader import Reader
from qsf.file.writer import Writer
from qsf_converter import cli, convert, meta
from qsf_converter.calibrate import type_choice
from qsf_converter.calibrate.texts import (
    CalibrationText,
    cut_samples,
    read_calibration_text,
    read_texts,
)
from qsf_converter.calibrate.type_choice import (
    assign,
    bytes_at,
    candidates,
    file_bytes,
    fit_to_size,
    guessed_costs,
    mixed_policy,
    policy_of,
    with_policy,
)
from qsf_converter.request import Request
from qsf_converter.rounding.pieces import rounded_units
from qsf_converter.rounding.plan import Plan, Policy, Share, Target, make_plan
from qsf_converter.rounding.tiles import tile_bytes
from qsf_converter.sources.checkpoint import SourceTensor
from qsf_converter.sources.families.rules import Place, TensorRule
from qsf_converter.sources.source import Source, open_source

TYPES = (Dtype.Q2_SYM, Dtype.Q2, Dtype.Q3, Dtype.Q4, Dtype.Q8)
SECTIONS = {"TOKN": 12345, "CHAT": 77, "META": 1001}
Costs = dict[str, dict[Dtype, float]]


# ---- the knapsack ----
def matrix(idx: int, n_rows: int, n_cols: int) -> Target:
    rule = TensorRule(Place.LAYER, TensorType.FFN_UP, "x", ("dim", "dim"))
    source = SourceTensor("x", (n_rows, n_cols), "F16", 2 * n_rows * n_cols)
    share = Share(0, n_rows, n_rows, n_rows)
    return Target(rule, source, layer_unit(idx), n_rows, n_cols, share, Dtype.Q4, is_vector=False)


def data_bytes(target: Target, dtype: Dtype) -> int:
    return -(-tile_bytes(dtype, target.n_rows, target.n_cols) // 64) * 64


def best_cost(targets: list[Target], costs: Costs, budget_bytes: int) -> float:
    """Of all choices, the least cost within the budget."""
    options = [
        [(data_bytes(target, dtype), cost) for dtype, cost in costs[target.name].items()]
        for target in targets
    ]
    return min(
        sum(cost for _, cost in choice)
        for choice in itertools.product(*options)
        if sum(n_bytes for n_bytes, _ in choice) <= budget_bytes
    )


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Target], Costs, int]:
    # Few different numbers, so that there are ties; costs that a larger type does not lower.
    sizes = st.sampled_from([1, 16, 48, 64, 100, 320])
    values = st.one_of(st.integers(0, 6).map(float), st.floats(0, 5))
    targets, costs = [], {}
    for idx in range(draw(st.integers(1, 5))):
        target = matrix(idx, draw(sizes), draw(sizes))
        types = draw(st.lists(st.sampled_from(TYPES), min_size=1, max_size=5, unique=True))
        targets.append(target)
        costs[target.name] = {dtype: draw(values) for dtype in types}
    ends = [
        sum(pick(data_bytes(t, d) for d in costs[t.name]) for t in targets) for pick in (min, max)
    ]
    return targets, costs, draw(st.integers(ends[0], ends[1] + 100))


@given(problems())
def test_no_choice_within_the_budget_is_better(problem: tuple[list[Target], Costs, int]) -> None:
    targets, costs, budget_bytes = problem
    found = assign(targets, costs, budget_bytes)
    best = best_cost(targets, costs, budget_bytes)
    assert found.cost == pytest.approx(best, rel=1e-8, abs=1e-12)
    assert found.bound == found.cost
    chosen = [(t, found.dtypes[t.name]) for t in targets]
    assert found.n_bytes == sum(data_bytes(t, dtype) for t, dtype in chosen) <= budget_bytes
    assert found.cost == pytest.approx(sum(costs[t.name][dtype] for t, dtype in chosen))


@pytest.fixture(scope="module")
def large() -> tuple[list[Target], Costs]:
    """70 layers of 7 matrices of several shapes; no two cost the same."""
    rng = np.random.default_rng(1)
    shapes = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)]
    shapes += [(14336, 4096), (14336, 4096), (4096, 14336)]
    targets = [matrix(idx, *shapes[idx % 7]) for idx in range(490)]
    return targets, {
        target.name: {
            dtype: float(rng.lognormal(-6, 0.7) * loss)
            for dtype, loss in zip(TYPES, (1.04, 1.0, 0.2, 0.04, 0.0002), strict=True)
        }
        for target in targets
    }


def budget_at(targets: list[Target], bits_per_weight: float) -> int:
    return int(sum(t.n_rows * t.n_cols for t in targets) * bits_per_weight / 8)


@pytest.mark.parametrize("bits_per_weight", [2.26, 3.5, 4.85, 9.0])
def test_large_models_are_solved_exactly(
    large: tuple[list[Target], Costs], bits_per_weight: float
) -> None:
    targets, costs = large
    budget_bytes = budget_at(targets, bits_per_weight)
    found = assign(targets, costs, budget_bytes)
    assert found.n_bytes <= budget_bytes
    assert found.bound == found.cost
    # A price of a byte, whichever, proves a bound of all choices; the best price is near.
    n_bytes = np.array([[data_bytes(t, dtype) for dtype in TYPES] for t in targets])
    values = np.array([[costs[t.name][dtype] for dtype in TYPES] for t in targets])
    bounds = [
        (values + price * n_bytes).min(axis=1).sum() - price * budget_bytes
        for price in np.geomspace(1e-14, 1e-8, 400)
    ]
    assert max(bounds) <= found.cost * (1 + 1e-9)
    if bits_per_weight < 8.25:
        assert found.cost <= max(bounds) * 1.01


def test_the_bound_is_true_when_states_are_dropped(
    large: tuple[list[Target], Costs], monkeypatch: pytest.MonkeyPatch
) -> None:
    targets, costs = large
    # The same shape everywhere leaves few sums of bytes; odd ones leave many.
    targets = [
        dataclasses.replace(target, n_rows=target.n_rows + 16 * (37 * idx % 101))
        for idx, target in enumerate(targets[:60])
    ]
    budget_bytes = budget_at(targets, 3.1)
    best = assign(targets, costs, budget_bytes)
    monkeypatch.setattr(type_choice, "_MOST_STATES", 1)
    monkeypatch.setattr(type_choice, "_LEAST_STATES", 1)
    found = assign(targets, costs, budget_bytes)
    assert found.bound <= best.cost <= found.cost
    assert found.bound < found.cost  # else nothing was dropped here
    assert found.cost <= found.bound * 1.02


def test_of_two_types_of_the_same_cost_the_smaller_is_taken() -> None:
    target = matrix(0, 64, 64)
    found = assign([target], {target.name: {Dtype.Q8: 1.0, Dtype.Q3: 1.0, Dtype.Q2: 2.0}}, 10**6)
    assert found.dtypes == {target.name: Dtype.Q3}


def test_what_cannot_be_assigned_is_refused() -> None:
    target = matrix(0, 16, 64)
    assert assign([target], {target.name: {Dtype.Q2: 1.0}}, 320).n_bytes == 320
    with pytest.raises(QsfConversionError, match="at least 320 bytes, 319 are left"):
        assign([target], {target.name: {Dtype.Q2: 1.0}}, 319)
    for costs in ({Dtype.Q2: float("nan")}, {Dtype.Q2: float("inf")}, {}):
        with pytest.raises(QsfConversionError, match=r"0\.FFN_UP: costs"):
            assign([target], {target.name: costs}, 1000)


# ---- sizes ----
@pytest.fixture(params=["llama", "llama-tied", "gpt2"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Source]:
    folder = tmp_path / "model"
    if request.param == "gpt2":
        tiny_checkpoints.make_gpt2(folder, dim=198)
    else:
        tied = request.param == "llama-tied"
        tiny_checkpoints.make_llama(folder, tied_head=tied, dim=176, ffn_dim=300, n_layers=4)
    with open_source(folder) as opened:
        yield opened


def plan_of(source: Source, policy: Policy | None = None) -> Plan:
    policy = policy or Policy(Dtype.Q4, Dtype.Q8)
    return make_plan(source.family, source.facts, source.checkpoint, policy)


def write(source: Source, plan: Plan, path: Path) -> int:
    """Write the file of a plan, with SECTIONS; return its size."""
    header = dataclasses.replace(plan.facts.header, dtype=Dtype.MIXED)
    positions = b""
    with Writer(path, header, plan.facts.arch) as writer:
        for unit in rounded_units(plan.units, source.checkpoint, 1):
            if unit.unit.place is Place.POSITIONS:
                positions = b"".join(p.data for t in unit.tensors for p in t.pieces)
                continue
            writer.begin_unit(unit.unit.id, dtype=Dtype.MIXED)
            for tensor in unit.tensors:
                target = tensor.target
                assert target.rule.target is not None
                layout = Layout.VECTOR if target.is_vector else Layout.TILES
                writer.begin_tensor(
                    target.rule.target, target.n_rows, target.n_cols, target.dtype, layout
                )
                for rounded in tensor.pieces:
                    writer.write(rounded.data)
                writer.end_tensor()
            writer.end_unit()
        if positions:
            writer.add_section("WPOS", positions, required=True)
        for tag, n_bytes in SECTIONS.items():
            writer.add_section(tag, bytes(n_bytes))
    return path.stat().st_size


def shuffled_costs(plan: Plan, seed: int) -> Costs:
    rng = np.random.default_rng(seed)
    costs = guessed_costs(plan, candidates(plan.targets))
    return {
        name: {dtype: cost * scale for dtype, cost in by_type.items()}
        for (name, by_type), scale in zip(
            costs.items(), rng.lognormal(0, 1.5, len(costs)), strict=True
        )
    }


def test_predicted_sizes_are_those_of_the_files(source: Source, tmp_path: Path) -> None:
    plan = plan_of(source)
    rng = np.random.default_rng(5)
    policies = [
        Policy(Dtype.TERNARY_DENSE, Dtype.Q3),
        Policy(Dtype.F16, Dtype.F32),
        mixed_policy(plan.targets),
    ]
    for _ in range(4):
        types = rng.choice([int(dtype) for dtype in type_choice.LAYER_CANDIDATES], 64)
        names = candidates(plan.targets)
        picked = {name: Dtype(int(dtype)) for name, dtype in zip(names, types, strict=False)}
        policies.append(policy_of(plan.targets, picked))
    for policy in policies:
        changed = with_policy(plan, policy)
        assert changed == plan_of(source, policy)
        assert file_bytes(changed, SECTIONS) == write(source, changed, tmp_path / "out.qsf")


def test_the_size_of_a_whole_conversion_is_predicted(
    tiny_llama_dir: Path, tiny_gpt2_dir: Path, tmp_path: Path
) -> None:
    for folder in (tiny_llama_dir, tiny_gpt2_dir):
        convert(folder, tmp_path / "out.qsf", quant_type="8bit", embed_type="4bit", force=True)
        with Reader(tmp_path / "out.qsf") as reader:
            sizes = {tag: len(reader.read_section(tag)) for tag in ("TEXT", *SECTIONS)}
            assert all(t.layout != Layout.OUTLIERS for t in reader.tensors)
        with open_source(folder) as source:
            plan = plan_of(source, Policy(Dtype.Q8, Dtype.Q4))
        assert file_bytes(plan, sizes) == (tmp_path / "out.qsf").stat().st_size


@pytest.mark.parametrize("seed", [0, 1])
def test_files_are_never_larger_than_asked(source: Source, tmp_path: Path, seed: int) -> None:
    plan = plan_of(source)
    costs = shuffled_costs(plan, seed)
    lowest, highest = (
        file_bytes(with_policy(plan, Policy(*types)), SECTIONS)
        for types in ((Dtype.Q2_SYM, Dtype.Q3), (Dtype.Q8, Dtype.F16))
    )
    last_cost = np.inf
    for most_bytes in np.linspace(lowest, highest, 7).astype(int):
        found = fit_to_size(plan, costs, int(most_bytes), SECTIONS)
        fitted = with_policy(plan, policy_of(plan.targets, found.dtypes))
        assert write(source, fitted, tmp_path / "out.qsf") <= most_bytes
        assert found.cost <= last_cost
        last_cost = found.cost
        # As good as the best choice that would fit with whatever padding between units.
        n_units = len(pass_units(plan.facts.header.n_layers))
        n_data = sum(data_bytes(t, t.dtype) for t in fitted.targets if t.is_matrix)
        others = file_bytes(fitted, SECTIONS) - n_data + n_units * 4096
        with contextlib.suppress(QsfConversionError):
            assert found.cost <= assign(plan.targets, costs, int(most_bytes) - others).cost
    best = {name: min(by_type, key=lambda d: by_type[d]) for name, by_type in costs.items()}
    assert found.dtypes == best


def test_bits_per_weight_count_the_whole_file(source: Source) -> None:
    plan = plan_of(source)
    n_weights = sum(t.n_rows * t.n_cols for t in plan.targets)
    assert bytes_at(plan, 4.5) == n_weights * 45 // 80
    n_bytes = file_bytes(plan, SECTIONS)
    assert bytes_at(plan, n_bytes * 8 / n_weights) in (n_bytes - 1, n_bytes)


# ---- types without measuring ----
def dtypes_of(policy: Policy, plan: Plan) -> Mapping[str, Dtype]:
    return {t.name: t.dtype for t in with_policy(plan, policy).targets if t.is_matrix}


def test_mixed_is_the_table_of_the_plan(source: Source) -> None:
    plan = plan_of(source)
    policy = mixed_policy(plan.targets)
    assert policy.layers == Dtype.MIXED
    assert policy.embeddings == Dtype.Q4
    others = {"ATTN_OUT": Dtype.Q3} | dict.fromkeys(("FFN_DOWN", "EMBEDDING", "HEAD"), Dtype.Q4)
    found = dtypes_of(policy, plan)
    assert found == {name: others.get(name.split(".")[-1], Dtype.Q2) for name in found}
    for target in with_policy(plan, policy).targets:
        if target.is_vector:
            assert target.dtype == Dtype.F32


def test_the_header_says_mixed_only_when_types_differ(source: Source) -> None:
    plan = plan_of(source)
    names = candidates(plan.targets)
    policy = policy_of(plan.targets, dict.fromkeys(names, Dtype.Q3))
    assert (policy.layers, policy.embeddings) == (Dtype.Q3, Dtype.Q3)
    policy = policy_of(plan.targets, {**dict.fromkeys(names, Dtype.Q3), "1.Q": Dtype.Q8})
    assert (policy.layers, policy.embeddings) == (Dtype.MIXED, Dtype.Q3)


def test_guessed_costs_fall_with_the_bits(source: Source) -> None:
    plan = plan_of(source)
    costs = guessed_costs(plan, candidates(plan.targets))
    assert costs.keys() == candidates(plan.targets).keys()
    for by_type in costs.values():
        assert list(by_type.values()) == sorted(by_type.values(), reverse=True)
        assert min(by_type.values()) > 0
    assert costs["0.Q"][Dtype.Q2] > costs["1.Q"][Dtype.Q2]


# ---- what people ask for ----
MB = 2**20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path) -> Path:
    folder = tmp_path_factory.mktemp("model")
    calibrated_models.write_text(folder / "text.txt")
    return calibrated_models.small_llama(folder / "m", tiny_llama_dir, n_layers=2)


def text_of(model: Path, path: Path | str, n_tokens: int = 512) -> CalibrationText:
    with calibrated_models.planned(model) as (source, _):
        found = read_calibration_text(
            source, Request("4bit", calibration=str(path), calibration_tokens=n_tokens)
        )
    assert found is not None
    return found


def types_of(file: Path) -> dict[str, Dtype]:
    """Of the matrices, by their names."""
    found = {}
    with Reader(file) as reader:
        for t in reader.tensors:
            if t.dtype != Dtype.F32:
                unit = reader.units[t.unit_idx].id
                layer = f"{unit.layer}." if unit.role == Role.LAYER else ""
                found[layer + TensorType(t.type).name] = Dtype(t.dtype)
    return found


@pytest.mark.parametrize(("options", "message"), refusals("requests"))
def test_what_does_not_go_together_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(QsfArgumentError, match=re.escape(message)):
        Request(**options).check()


def test_mixed_with_a_text_is_no_larger_than_the_table(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "table.qsf", quant_type="mixed")
    report = convert(
        model,
        tmp_path / "out.qsf",
        quant_type="mixed",
        calibration=model.parent / "text.txt",
        calibration_tokens=512,
    )
    # The text's own facts come in addition, and are no weights.
    quality = report.quality.meta()
    n_bytes = len(json.dumps({k: v for k, v in quality.items() if k != "tensors"}))
    most = (tmp_path / "table.qsf").stat().st_size + n_bytes + 8192
    assert (tmp_path / "out.qsf").stat().st_size <= most
    assert types_of(tmp_path / "out.qsf") != types_of(tmp_path / "table.qsf")


@pytest.mark.parametrize(("arguments", "message", "code"), refusals("qsf-convert"))
def test_wrong_usage_is_one_line(
    arguments: list[object],
    message: str,
    code: int,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.run([str(model), str(tmp_path / "o.qsf"), *map(str, arguments)]) == code
    out, said = capsys.readouterr()
    assert out == ""
    assert len(said.splitlines()) == 1, said
    assert said.startswith("qsf-convert: error: ")
    assert message in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("target", [("--target-size", "0.4"), ("--target-bpw", "32")])
def test_sizes_as_people_type_them(target: tuple[str, str], model: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.qsf"
    assert cli.run([str(model), str(out), *target, "-q"]) == 0
    with Reader(out) as reader:
        n_weights = sum(t.n_rows * t.n_cols for t in reader.tensors)
    most = 0.4 * MB if target[0] == "--target-size" else 32 / 8 * n_weights
    assert out.stat().st_size <= most


def bounds(model: Path, tmp_path: Path, **options: Any) -> int:
    """The smallest size in bytes that is said to be possible."""
    with pytest.raises(QsfConversionError) as caught:
        convert(model, tmp_path / "none.qsf", quant_type="mixed", target_size=10 / MB, **options)
    said = re.fullmatch(
        r"a file of 0\.00 MB is too small for this model: the smallest has ([\d.]+) MB .*",
        str(caught.value),
    )
    assert said is not None, caught.value
    assert list(tmp_path.iterdir()) == []
    return int(float(said[1]) * MB)


@pytest.mark.parametrize("embed_type", [None, "f16"])
def test_a_size_is_kept(embed_type: str | None, model: Path, tmp_path: Path) -> None:
    least = bounds(model, tmp_path, embed_type=embed_type)
    sizes = []
    for more in (0, 5000, 20000, 90000, 1 << 30):
        out = tmp_path / "out.qsf"
        convert(
            model, out, quant_type="mixed", embed_type=embed_type, target_size=(least + more) / MB,
            force=True,
        )  # fmt: skip
        sizes.append(out.stat().st_size)
        assert sizes[-1] <= least + more
        found = types_of(out)
        if embed_type is not None:
            wanted = Dtype.F16 if embed_type == "f16" else Dtype.Q4
            assert {found["EMBEDDING"], found["HEAD"]} == {wanted}
    assert sizes == sorted(sizes)
    assert len(set(sizes)) >= 4
    # What is left over is less than what some tensor would take, and the report's upper bound.
    assert least + 20000 - sizes[2] < 16000
    assert set(found.values()) <= {Dtype.Q8, Dtype.F16, Dtype.Q4}


def test_what_meta_will_say_of_the_text_is_in_the_size(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The name stands in META twice, and every one of its characters takes six there.
    text = calibrated_models.write_text(tmp_path / ("\x01" * 250 + ".txt"))
    out = tmp_path / "out.qsf"
    foreseen: list[int] = []
    section_bytes = meta.section_bytes

    def noted(*arguments: Any) -> dict[str, int]:
        sizes: dict[str, int] = section_bytes(*arguments)
        foreseen.append(sizes["META"] - meta._COMPRESSION_BYTES)
        return sizes

    monkeypatch.setattr(meta, "section_bytes", noted)
    most = 1 << 20
    convert(
        model, out, quant_type="mixed", target_size=most / MB, calibration=text,
        calibration_tokens=512, embed_type="8bit",
    )  # fmt: skip
    assert out.stat().st_size <= most
    with Reader(out) as reader:
        assert len(reader.read_section("META")) <= foreseen[0]


def test_an_impossible_size_is_refused_before_the_work(model: Path, tmp_path: Path) -> None:
    least = bounds(model, tmp_path)

    def phase(name: str) -> Callable[[int, int], None]:
        pytest.fail(f"began with {name}")

    text = model.parent / "text.txt"
    with pytest.raises(QsfConversionError, match=r"the smallest has [\d.]+ MB"):
        convert(
            model, tmp_path / "out.qsf", quant_type="mixed", calibration=text,
            target_size=(least // 2) / MB, phase=phase,
        )  # fmt: skip
    assert list(tmp_path.iterdir()) == []


# ---- the text ----
def rows_of(tokens: NDArray[np.int32]) -> set[bytes]:
    return {row.tobytes() for row in tokens}


@pytest.mark.parametrize("n_tokens", [512, 1000, 1500])
def test_held_out_samples_are_others_than_the_fitted(n_tokens: int, model: Path) -> None:
    path = model.parent / "text.txt"
    found = text_of(model, path, n_tokens)
    assert found.fitted.shape[1] == found.held_out.shape[1] == 64
    assert len(found.held_out) == max(1, n_tokens // 64 // 8)
    assert len(found.fitted) == n_tokens // 64
    n = len(found.fitted) + len(found.held_out)
    assert len(rows_of(found.fitted) | rows_of(found.held_out)) == n
    with calibrated_models.planned(model) as (source, _):
        assert source.tokenizer is not None
        header = source.facts.header
        whole = cut_samples(
            source.tokenizer, read_texts(path), n_tokens=64, max_samples=n,
            bos_id=header.bos_id, eos_id=header.eos_id,
        )  # fmt: skip
    assert rows_of(whole) == rows_of(found.fitted) | rows_of(found.held_out)
    again = text_of(model, path, n_tokens)
    np.testing.assert_array_equal(again.fitted, found.fitted)
    np.testing.assert_array_equal(again.held_out, found.held_out)
    assert again.sha256 == found.sha256
    # Spread over the text, not its end.
    order = [row.tobytes() for row in whole]
    at = [order.index(row.tobytes()) for row in found.held_out]
    assert max(np.diff([-1, *at, n])) <= n // len(at) + 1 + n % len(at)


def test_a_short_text_is_taken_whole(model: Path, tmp_path: Path) -> None:
    found = text_of(model, calibrated_models.write_text(tmp_path / "t.txt", 180), 65536)
    assert (len(found.fitted), len(found.held_out)) == (len(found.fitted), 1)
    assert 1 <= len(found.fitted) <= 6


def test_a_text_that_is_none_is_one_line(model: Path, tmp_path: Path) -> None:
    """What files are texts is in test_texts."""
    (tmp_path / "out").mkdir()
    for name, content, message in (
        ("gone.txt", None, "gone.txt: no such file"),
        ("short.txt", b"Once upon a time", "at least 63 are needed"),
        ("sample.txt", b"the cat " * 45, "at least two samples of 64"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises((QsfIOError, QsfConversionError), match=message) as caught:
            convert(model, tmp_path / "out" / "o.qsf", calibration=tmp_path / name)
        assert "\n" not in str(caught.value)
        assert list((tmp_path / "out").iterdir()) == []


def test_a_model_without_a_tokenizer_cannot_be_calibrated(
    tiny_llama_dir: Path, tmp_path: Path
) -> None:
    folder = calibrated_models.small_llama(tmp_path / "m", tiny_llama_dir)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(QsfConversionError, match=r"there is no tokenizer\.json"):
        convert(folder, tmp_path / "o.qsf", calibration="bundled")


def test_a_tokenizer_of_another_model_is_noticed(tiny_llama_dir: Path, tmp_path: Path) -> None:
    folder = calibrated_models.small_llama(tmp_path / "m", tiny_llama_dir, n_vocab=150)
    with pytest.raises(
        QsfConversionError, match=r"makes the token \d+, and the model has 150 tokens"
    ):
        convert(folder, tmp_path / "o.qsf", calibration="bundled", calibration_tokens=512)
