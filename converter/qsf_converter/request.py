"""The request of a conversion: one frozen record, checked as a whole before any work."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from qsf.errors import QsfArgumentError
from qsf.file.layout import Dtype
from qsf_converter.rounding import plan
from qsf_converter.rounding.compression import DEFAULT_COMPRESSION, parse_compression
from qsf_converter.rounding.plan import DEFAULT_EMBED_TYPE, KEEP, Policy, parse_quant_type

MIXED: Final = "mixed"
AUTO: Final = "auto"
BUNDLED: Final = "bundled"  # selects our own calibration text
DEFAULT_CALIBRATION_TOKENS: Final = 65536
LEAST_CALIBRATION_TOKENS: Final = 512
DEFAULT_TERNARY_RULE: Final = "search"
TERNARY_RULES: Final = (DEFAULT_TERNARY_RULE, "absmean")


def bytes_of(target_size: float | None) -> int | None:
    if target_size is None:
        return None
    if not math.isfinite(target_size):
        raise QsfArgumentError(f"--target-size is {target_size}, not a number of MB")
    return int(target_size * 2**20)


@dataclass(frozen=True, slots=True)
class Request:
    """The options of a conversion.

    Attributes:
        quant_type: type of the layers' matrices; ``mixed`` chooses one for each matrix, ``keep``
            stores the blocks of a quantised GGUF file as they are, ``auto`` chooses types within
            the bytes of Q4_K_M and rounds with error feedback (``one_pass``). Default: ``mixed``
            with a target size, ``ternary`` if the source's weights are, ``keep`` if they are blocks
            that can be kept, 8bit of encoders, ``auto`` up to 1B weights, else 4bit.
        embed_type: type of the embeddings and the head; default: 8bit, ``quant_type`` if it
            is f16 or f32, chosen with ``mixed``, kept with ``keep``.
        calibration: a file of text or JSONL for calibration, or ``bundled`` for our own text.
            Finished layers are kept in the folder OUT.calibration until the file is complete:
            after an interruption the same call continues from there and makes the same file.
        calibration_tokens: how many tokens of that text, at least 512.
        target_bytes: the largest size of the file; needs ``mixed``.
        target_bpw: the same, in bits of the file for each weight, above 0 and at most 32.
        ternary_rule: how ternary types round: ``search`` finds the best scale of each block;
            ``absmean`` is BitNet b1.58's rule, one scale for each matrix.
        compress: compression of the layers: none, lz4, lz4hc, zstd.
        needs_tokenizer: refuse a model without a usable tokenizer.
        needs_template: refuse a model whose chat template cannot be rendered.
        overwrite: replace the output if it exists.
        measures_costs: measure what 8-bit activations and an 8-bit KV cache cost; if not, the
            file's defaults are the safe ones.
        n_threads: threads that round; default: one per core.
        unkept_type: with ``keep``, type of matrices that cannot be kept.
        adapters: adapters of low rank, merged before rounding: PEFT's folders or GGUF files, each
            with a colon and a scale or without (1).
    """

    quant_type: str | None = None
    embed_type: str | None = None
    calibration: str | None = None
    calibration_tokens: int = DEFAULT_CALIBRATION_TOKENS
    target_bytes: int | None = None
    target_bpw: float | None = None
    ternary_rule: str = DEFAULT_TERNARY_RULE
    compress: str = DEFAULT_COMPRESSION
    needs_tokenizer: bool = False
    needs_template: bool = True
    overwrite: bool = False
    measures_costs: bool = True
    n_threads: int | None = None
    unkept_type: str = DEFAULT_EMBED_TYPE
    adapters: tuple[str, ...] = ()

    @property
    def layer_type(self) -> str:
        return self.quant_type or (MIXED if self.has_target else plan.DEFAULT_QUANT_TYPE)

    @property
    def has_target(self) -> bool:
        """True if the size of the file is limited."""
        return self.target_bytes is not None or self.target_bpw is not None

    @property
    def is_plain(self) -> bool:
        """True if nothing is asked that ``auto`` cannot do."""
        rule = self.ternary_rule
        return not (self.calibration or self.embed_type) and rule == DEFAULT_TERNARY_RULE

    @property
    def has_chosen_types(self) -> bool:
        """True if each matrix gets a type of its own."""
        return self.layer_type in (MIXED, AUTO)

    @property
    def may_add_bytes(self) -> bool:
        """True if outliers may get more bits, or tables of their own.

        A file of a limited size has no room for them, and ``absmean`` fixes every scale.
        """
        is_limited = self.has_target or self.layer_type == AUTO
        return not is_limited and self.ternary_rule == DEFAULT_TERNARY_RULE

    def check_for_ternary_source(self) -> None:
        """Raise QsfArgumentError for options that would change weights that are ternary already."""
        if self.ternary_rule != DEFAULT_TERNARY_RULE:
            raise QsfArgumentError(
                f"the weights are ternary already: the ternary rule {self.ternary_rule} would "
                f"change their scales, {DEFAULT_TERNARY_RULE} keeps them"
            )
        if (
            self.calibration is not None
            and plan.QUANT_TYPES.get(self.layer_type) in plan.TERNARY_TYPES
        ):
            raise QsfArgumentError(
                f"the weights are ternary already: {self.layer_type} keeps them, which leaves "
                "nothing to calibrate"
            )

    def check(self) -> None:
        """Raise QsfArgumentError for an unknown value, or for options that exclude each other.

        Raises QsfUnsupportedError when the Python package of the compression is not installed.
        """
        self._check_types()
        self._check_ternary_rule()
        self._check_target()
        if self.calibration_tokens < LEAST_CALIBRATION_TOKENS:
            raise QsfArgumentError(
                f"{self.calibration_tokens} calibration tokens are too few: at least "
                f"{LEAST_CALIBRATION_TOKENS} are needed"
            )
        parse_compression(self.compress)

    def _check_types(self) -> None:
        if self.layer_type == KEEP and self.calibration is not None:
            raise QsfArgumentError(
                "quant type keep rounds nothing, so there is nothing to calibrate: give a type"
            )
        if self.layer_type == AUTO and (self.calibration or self.embed_type):
            raise QsfArgumentError(
                "quant type auto has a text of its own and chooses all types: with --calibration "
                "or --embed-type give another type, such as mixed with --target-size"
            )
        if self.layer_type != MIXED:
            if self.layer_type not in (KEEP, AUTO):
                parse_quant_type(self.layer_type)
            if self.has_target:
                raise QsfArgumentError(
                    "a target size chooses the types itself: it needs quant type mixed, not "
                    f"{self.layer_type}"
                )
        if self.embed_type is not None:
            parse_quant_type(self.embed_type, option="embed type")

    def _check_ternary_rule(self) -> None:
        rule = self.ternary_rule
        if rule not in TERNARY_RULES:
            raise QsfArgumentError(
                f"ternary rule {rule} is unknown; available: {', '.join(TERNARY_RULES)}"
            )
        if rule == DEFAULT_TERNARY_RULE:
            return
        if plan.QUANT_TYPES.get(self.layer_type) not in plan.TERNARY_TYPES:
            raise QsfArgumentError(
                f"the ternary rule {rule} is for ternary types, not {self.layer_type}"
            )
        if self.calibration is not None:
            raise QsfArgumentError(
                f"the ternary rule {rule} fixes every scale and leaves nothing to calibrate"
            )

    def _check_target(self) -> None:
        if self.target_bytes is not None and self.target_bpw is not None:
            raise QsfArgumentError(
                "the target size is given twice, in MB and in bits a weight: give one of them"
            )
        if self.target_bpw is not None and not 0 < self.target_bpw <= 32:
            raise QsfArgumentError(
                f"a target of {self.target_bpw:g} bits a weight is not above 0 and at most 32"
            )
        if self.target_bytes is not None and self.target_bytes <= 0:
            raise QsfArgumentError("the target size is not above zero")

    def meta_options(self) -> dict[str, str]:
        """Return the options that META records, without paths and without the types chosen."""
        options = {}
        if self.calibration is not None:
            options["calibration_tokens"] = str(self.calibration_tokens)
        if self.target_bytes is not None:
            options["target_bytes"] = str(self.target_bytes)
        if self.target_bpw is not None:
            options["target_bpw"] = f"{self.target_bpw:g}"
        if self.ternary_rule != DEFAULT_TERNARY_RULE:
            options["ternary_rule"] = self.ternary_rule
        return options

    def first_policy(self) -> Policy:
        """Return the types before any measurement."""
        embed_type = self.embed_type
        if self.layer_type == KEEP:
            rest = parse_quant_type(self.unkept_type)
            embeddings = parse_quant_type(embed_type, option="embed type") if embed_type else rest
            return Policy(rest, embeddings, keeps_layers=True, keeps_embeddings=not embed_type)
        if embed_type is None:
            is_float = self.layer_type in ("f16", "f32")
            embed_type = self.layer_type if is_float else DEFAULT_EMBED_TYPE
        embeddings = parse_quant_type(embed_type, option="embed type")
        is_mixed = self.has_chosen_types
        layers = Dtype.MIXED if is_mixed else parse_quant_type(self.layer_type)
        return Policy(layers, embeddings)
