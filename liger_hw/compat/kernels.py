"""Behind the `*_kernel` names of `liger_kernel.ops.*`: Liger Kernel's own Triton kernels, which are not here.

Each can be imported, since a program often imports one beside what it needs; launching it raises. liger_hw's kernels
have other arguments, so no kernel answers to one of these names.
"""

from __future__ import annotations

from typing import Any, NoReturn


class MissingKernel:
    """Stands for a Triton kernel of Liger Kernel's; every use raises `NotImplementedError` with what to call instead.

    name: as `liger_kernel.ops.cross_entropy.liger_cross_entropy_kernel`; instead: the words of what to use
    """

    def __init__(self, name: str, instead: str) -> None:
        self.name, self.instead = name, instead

    def __repr__(self) -> str:
        return f"<{self.name}, which liger_hw does not have>"

    def refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{self.name} is a Triton kernel of Liger Kernel's own, which liger_hw does not have: {self.instead}"
        )

    __call__ = __getitem__ = run = warmup = refuse
