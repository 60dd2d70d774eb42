"""What a family's spec states, and the keywords that most families' public functions share."""

from __future__ import annotations

from dataclasses import dataclass

LOSS = (("cross_entropy", False), ("fused_linear_cross_entropy", True))
ROPE, NO_ROPE = (("rope", True),), (("rope", False),)
NORM, LAYER_NORM = (("rms_norm", True),), (("layer_norm", True),)
SWIGLU, GEGLU = (("swiglu", True),), (("geglu", True),)
MODEL = (("model", None),)

LLAMA_LIKE = (*ROPE, *LOSS, *NORM, *SWIGLU, *MODEL)
"""Keywords of most families' public function, in Liger's order, with their defaults."""


@dataclass(frozen=True)
class FamilySpec:
    """A family of transformers models.

    name: suffix of `apply_liger_kernel_to_<name>` and, by default, of the modeling module
    models: names of its model classes in the modeling module; a class patch examines one model of each, without weights
    parameters: keyword and default of each argument of the public function, in order, `model` among them; a
        fused_linear_cross_entropy of None means the fused loss unless cross_entropy is asked for
    module: name of the package in transformers.models, where it is not `name`
    also: options that the function takes beyond its signature, as `**kwargs`; on unless given as False
    types: values of `config.model_type` that mean this family, beside its name
    """

    name: str
    models: tuple[str, ...]
    parameters: tuple[tuple[str, bool | None], ...] = LLAMA_LIKE
    module: str = ""
    also: tuple[str, ...] = ()
    types: tuple[str, ...] = ()

    @property
    def model_types(self) -> tuple[str, ...]:
        return (self.name, *self.types)

    @property
    def function_name(self) -> str:
        return f"apply_liger_kernel_to_{self.name}"

    @property
    def modeling_module(self) -> str:
        package = self.module or self.name
        return f"transformers.models.{package}.modeling_{package}"
