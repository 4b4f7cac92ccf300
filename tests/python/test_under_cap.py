# SPDX-License-Identifier: Apache-2.0
"""What bench/under_cap.py makes of what it has measured, and where groups are looked for."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

MB = 1 << 20


@pytest.fixture(scope="module")
def under_cap(project_root: Path) -> Iterator[ModuleType]:
    sys.path.append(str(project_root / "bench"))
    yield importlib.import_module("under_cap")
    sys.path.remove(str(project_root / "bench"))


@pytest.fixture(scope="module")
def memory_group(under_cap: ModuleType) -> ModuleType:
    return sys.modules[under_cap.run_capped.__module__]


def outcome(under_cap: ModuleType, facts: dict[str, Any], output: str = "") -> Any:
    group = {"peak_bytes": 290 * MB, "n_at_limit": 0, "n_oom_kills": 0}
    return under_cap.Outcome(0, 1.0, 30 * MB, group, output, "", facts)


def qsf_facts(rate: float, **plan: int) -> dict[str, Any]:
    """A prompt of 5 tokens in one chunk, 64 tokens generated: 64 passes of 1000 MB."""
    return {
        "rate": rate,
        "peak_bytes": 280 * MB,
        "before": {"disk_bytes": 50_000_000, "session": {"read_bytes": 10_000_000}},
        "after": {"disk_bytes": 64_050_000_000, "session": {"read_bytes": 64_010_000_000}},
        "info": {"plan": {"chunk_tokens": 16, **plan}},
        "stats": {"evaluated_tokens": 5, "generated_tokens": 64, "step_tokens": 63},
    }


@pytest.fixture
def one_round(under_cap: ModuleType) -> Any:
    """A round at 300M: 2 GB/s, 1 GB a token; QSF at 90 % of that, the peer at a fourth of it."""
    disk = outcome(under_cap, {}, "direct x1 1.1 GB/s\nbest direct x4 1.90 GB/s\n")
    disk_after = outcome(under_cap, {}, "best uring x2 2.10 GB/s\n")
    qsf = outcome(under_cap, qsf_facts(1.8))
    peer = outcome(under_cap, {"rate": 0.45, "peak_bytes": 301 * MB})
    return under_cap.Round(300 * MB, 64, disk, qsf, disk_after, peer)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


# ---- limits and folders ----


def test_limits(memory_group: ModuleType) -> None:
    known = {"300M": 300 * MB, "1G": 1 << 30, "1.5G": 1536 * MB, "1M": MB}
    assert {text: memory_group.parse_limit(text) for text in known} == known
    names = {n_bytes: memory_group.limit_name(n_bytes) for n_bytes in known.values()}
    assert names == {300 * MB: "300M", 1 << 30: "1G", 1536 * MB: "1536M", MB: "1M"}
    for text in (
        "",
        "300",
        "300m",
        "0M",
        "0.5M",
        "1.5M",
        "1.001G",
        "-1M",
        "1.0001G",
        "1T",
        "300 M",
        "M",
        "1e3M",
    ):
        with pytest.raises(argparse.ArgumentTypeError, match="whole number of MB"):
            memory_group.parse_limit(text)


V1 = """\
24 1 0:21 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
30 24 0:27 / /sys/fs/cgroup/cpu rw,relatime shared:5 - cgroup cgroup rw,cpu
31 24 0:28 {root} /sys/fs/cgroup/memory rw,relatime shared:6 master:1 - cgroup cgroup rw,memory
40 24 0:29 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
V2 = "30 24 0:27 {root} /sys/fs/cgroup rw,nosuid shared:5 - cgroup2 cgroup2 rw,nsdelegate\n"


def test_groups_of_version_1_are_beside_all_others_or_inside_of_the_own(
    memory_group: ModuleType,
) -> None:
    own = "4:memory:/jobs/7\n3:cpu:/other\n0::/\n"
    top = Path("/sys/fs/cgroup/memory")
    found = memory_group.group_folders(V1.format(root="/"), own)
    assert found == [(1, top), (1, top / "jobs/7"), (2, Path("/sys/fs/cgroup/unified"))]
    # A container sees a part of the tree, and its own group by its name outside of that.
    found = memory_group.group_folders(V1.format(root="/jobs"), own)
    assert found[:2] == [(1, top), (1, top / "7")]


def test_groups_of_version_2_are_beside_the_own(memory_group: ModuleType) -> None:
    top = Path("/sys/fs/cgroup")
    own = "0::/user.slice/user-7.slice/app.scope\n"
    found = memory_group.group_folders(V2.format(root="/"), own)
    assert found == [(2, top / "user.slice/user-7.slice"), (2, top / "user.slice"), (2, top)]
    found = memory_group.group_folders(V2.format(root="/user.slice"), own)
    assert found == [(2, top / "user-7.slice"), (2, top)]
    assert memory_group.group_folders(V2.format(root="/"), "0::/\n") == [(2, top)]
    assert memory_group.group_folders(V2.format(root="/"), "0::/../other\n") == [(2, top)]
    assert memory_group.group_folders("", own) == []


def test_what_the_kernel_counts_is_read(memory_group: ModuleType, tmp_path: Path) -> None:
    folders = {version: tmp_path / str(version) for version in (1, 2)}
    for folder in folders.values():
        folder.mkdir()
    (folders[1] / "memory.max_usage_in_bytes").write_text("314572800\n")
    (folders[1] / "memory.failcnt").write_text("12\n")
    (folders[1] / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    (folders[2] / "memory.peak").write_text("4096\n")
    (folders[2] / "memory.events").write_text("low 0\nhigh 5\nmax 6\noom 7\noom_kill 8\n")
    v1 = memory_group.Group(1, folders[1]).peaks()
    assert v1 == {"peak_bytes": 314572800, "n_at_limit": 12, "n_oom_kills": 3}
    v2 = memory_group.Group(2, folders[2]).peaks()
    assert v2 == {"peak_bytes": 4096, "n_at_limit": 6, "n_oom_kills": 8}
    assert memory_group.number_after("rchar: 5\nread_bytes: 17\n", "read_bytes") == 17
    assert memory_group.number_after("cancelled_read_bytes: 17\n", "read_bytes") == 0


def test_the_limit_is_of_memory_and_of_swap(memory_group: ModuleType, tmp_path: Path) -> None:
    """Here, because where a limit cannot be set the tests in groups are skipped."""
    wanted = {
        1: {"memory.limit_in_bytes": str(MB), "memory.memsw.limit_in_bytes": str(MB)},
        2: {"memory.max": str(MB), "memory.swap.max": "0"},
    }
    for version, files in wanted.items():
        folder = tmp_path / str(version)
        folder.mkdir()
        group = memory_group.Group(version, folder)
        with pytest.raises(FileNotFoundError, match="no memory controller"):
            group.set_limit(MB)
        for name in (*files, "cgroup.procs"):
            (folder / name).write_text("max")
        group.set_limit(MB)
        assert {name: (folder / name).read_text() for name in files} == files
        (folder / list(files)[1]).unlink()  # a kernel without accounting of swap
        group.set_limit(MB)


def test_a_group_that_cannot_be_had_is_said(
    memory_group: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_controller = tmp_path / "no-controller"
    no_controller.mkdir()
    places = [(1, tmp_path / "absent"), (1, no_controller)]
    monkeypatch.setattr(memory_group, "group_folders", lambda *_: places)
    with (
        pytest.raises(memory_group.CapError, match=r"run this as root.*absent.*memory\.limit"),
        memory_group.memory_group(300 * MB),
    ):
        pass
    assert list(no_controller.iterdir()) == []


# ---- what runs ----


def test_options_reach_the_measured_processes(
    under_cap: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def commands(*words: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["under_cap.py", "m.qsf", *words])
        return under_cap.commands(under_cap.parse_arguments(), 300 * MB)

    plain = commands()
    assert list(plain) == ["disk", "qsf", "disk_after"]
    assert plain["disk"] == plain["disk_after"]
    asked = dict(zip(plain["qsf"], plain["qsf"][1:], strict=False))
    assert (asked["--ram-budget"], asked["--max-tokens"]) == ("300", "64")
    assert not {"--io", "--threads", "--max-seq-len"} & set(plain["qsf"])
    words = ["--io", "uring", "--threads", "1", "--max-seq-len", "99", "--tokens", "5"]
    words += ["--peer", "p.gguf", "--peer-python", "py", "--disk-bench", "disk --method direct"]
    full = commands(*words)
    asked = dict(zip(full["qsf"], full["qsf"][1:], strict=False))
    shown = {name: asked[name] for name in ("--io", "--threads", "--max-seq-len", "--max-tokens")}
    assert list(shown.values()) == ["uring", "1", "99", "5"]
    assert full["disk"] == ["disk", "--method", "direct", "m.qsf"]
    assert full["peer"][0] == "py"
    assert json.loads(full["peer"][-1]) == {
        "path": "p.gguf",
        "n_threads": 1,
        "ctx_tokens": 256,
        "n_steps": 6,
    }


# ---- what was found ----


def test_the_last_line_of_the_disks_reader_counts(under_cap: ModuleType) -> None:
    output = "direct x1 2.5 GB/s\ndirect x4 1.1 GB/s\nbest direct x4 1.72 GB/s\n"
    assert under_cap.parse_best(output) == ("direct x4", 1.72)
    for text in ("", "direct x4 1.72 GB/s", "best direct x4 1.72 GB/s\nmore"):
        with pytest.raises(ValueError, match="reader of the disk"):
            under_cap.parse_best(text)


def test_a_plain_read_says_how_fast_it_was(
    under_cap: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(3 * under_cap.READ_BYTES + 5))
    try:
        under_cap.read_plainly(str(path), 2 * under_cap.READ_BYTES, [1, 3])
    except SystemExit as error:
        pytest.skip(str(error))
    output = capsys.readouterr().out
    assert [line.split()[1] for line in output.splitlines()[:2]] == ["x1", "x3"]
    assert under_cap.parse_best(output)[1] > 0
    path.write_bytes(bytes(5))
    with pytest.raises(SystemExit, match="less than"):
        under_cap.read_plainly(str(path), 1, [1])


def test_bytes_of_a_token_are_the_plans_or_what_was_read(
    under_cap: ModuleType, one_round: Any
) -> None:
    assert one_round.n_passes == 64
    assert one_round.streamed_bytes == one_round.disk_bytes_per_token == 1e9
    planned = replace(one_round, qsf=outcome(under_cap, qsf_facts(1.8, streamed_bytes=500_000_000)))
    assert planned.streamed_bytes == 5e8
    assert planned.disk_limit == pytest.approx(4)
    in_memory = replace(one_round, qsf=outcome(under_cap, qsf_facts(1.8, streamed_bytes=0)))
    assert in_memory.disk_limit is None
    assert cells(under_cap.table({300 * MB: [in_memory]}).splitlines()[2])[5] == "-"
    assert under_cap.verdict([in_memory]) == "PASS"


def test_a_row_has_what_was_measured(under_cap: ModuleType, one_round: Any) -> None:
    lines = under_cap.table({300 * MB: [one_round], 512 * MB: []}).splitlines()
    assert len(lines) == 3
    assert len(cells(lines[0])) == len(cells(lines[1])) == len(cells(lines[2]))
    assert cells(lines[2]) == [
        "300M", "2.00", "1000", "2.00", "1.80", "90", "280.0, 290.0", "0.45", "4.0", "PASS",
    ]  # fmt: skip
    slower = replace(one_round, qsf=outcome(under_cap, qsf_facts(1.72)))
    lines = under_cap.table({300 * MB: [one_round, slower]}).splitlines()
    assert cells(lines[2])[4] == "1.76 (1.72..1.80)"


def test_every_ask_is_judged(under_cap: ModuleType, one_round: Any) -> None:
    def judged(**changes: Any) -> str:
        verdict = under_cap.verdict([replace(one_round, **changes)])
        assert isinstance(verdict, str)
        return verdict

    qsf = one_round.qsf
    assert judged() == "PASS"
    assert judged(qsf=outcome(under_cap, qsf_facts(1.69))) == "short: 84 of 85 %"
    fast_peer = outcome(under_cap, {"rate": 0.61})
    assert judged(peer=fast_peer) == "short: 2.95x of 3x"
    assert judged(peer=fast_peer, limit_bytes=512 * MB) == "PASS"
    assert judged(limit_bytes=3 << 30, peer=outcome(under_cap, {"rate": 0.46})) == (
        "short: 3.91x of 4x"
    )
    assert judged(limit_bytes=279 * MB) == "short: peak of RSS 280.0M; peak of group 290.0M"
    killed = {**qsf.group, "n_oom_kills": 1}
    assert "killed for its memory" in judged(qsf=replace(qsf, group=killed))
    refused = replace(qsf, exit_code=1, facts={}, errors="\nno room: 310 would do\n")
    assert judged(qsf=refused) == "short: QSF ended with 1: no room: 310 would do"
    assert judged(n_tokens=65).startswith("short: QSF ended with 0")
    assert judged(peer=None) == "PASS"


def test_a_peer_that_was_killed_is_shown(under_cap: ModuleType, one_round: Any) -> None:
    killed = replace(one_round.peer, exit_code=-9, facts={})
    line = under_cap.table({300 * MB: [replace(one_round, peer=killed)]}).splitlines()[2]
    assert cells(line)[7:9] == ["-, ended with -9", "-"]
    refused = replace(one_round.qsf, exit_code=1, facts={})
    line = under_cap.table({300 * MB: [replace(one_round, qsf=refused)]}).splitlines()[2]
    assert cells(line)[2:6] == ["-", "-", "-", "-"]


def test_the_json_has_a_round_even_without_speed(under_cap: ModuleType, one_round: Any) -> None:
    known = under_cap.describe(one_round)
    assert known["fraction"] == pytest.approx(0.9)
    assert known["qsf"]["group"]["peak_bytes"] == 290 * MB
    refused = replace(one_round, qsf=replace(one_round.qsf, exit_code=1, facts={}))
    assert "fraction" not in under_cap.describe(refused)
