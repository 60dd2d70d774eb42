"""All private interfaces of torch that the code uses, each with its reason; other files take them from here.

`ELSEWHERE` lists exceptions; tests/test_structure.py checks both. Names that a build of torch lacks are None.
"""

from __future__ import annotations

import torch
from torch import _C
from torch.nn.modules import module as _module

if torch.__version__ < "2.8.dev":
    raise ImportError(f"liger_hw needs torch 2.8 or newer, this is {torch.__version__}")

# for calls of operators
has_transforms = _C._are_functorch_transforms_active  # to refuse calls under a transform of torch.func; in every call
n_dispatch_modes = _C._len_torch_dispatch_stack  # without a torch mode, a call can bypass the dispatcher
is_profiling = _C._autograd._profiler_enabled  # torch's profiler records operators only through the dispatcher
unwrap_if_dead = _C._functorch.unwrap_if_dead  # what torch's Function.apply does with tensors of a finished transform
is_batched = _C._functorch.is_legacy_batchedtensor  # a batched gradient (is_grads_batched) has no memory
is_functorch_wrapped = _C._functorch.is_functorch_wrapped_tensor  # a transform's tensor has no memory
innermost_transform = _C._functorch.peek_interpreter_stack  # the transform in which a backward runs
without_torch_function = _C.DisableTorchFunctionSubclass  # for subclasses only; the public one disables modes too
make_data_ptr_raise = _C._set_throw_on_mutable_data_ptr  # `data_ptr()` of a tensor without memory must raise

# for autograd
keeps_graph = _C._autograd._get_current_graph_task_keep_graph  # whether a backward may run again (retain_graph)
graph_task = _C._current_graph_task_id  # whether autograd is running a backward
has_forward_gradients = _C._is_fwd_grad_enabled  # False only inside an autograd.Function
hooks_on_top = _C._autograd._top_saved_tensors_default_hooks  # whether the innermost saved-tensor hooks are ours
allows_saved_tensor_hooks = _C._autograd._saved_tensors_hooks_is_enabled  # False if a program disabled them

# for libraries and devices
assert_async = torch._assert_async  # an assertion on the device without waiting for it
integer_matmul = torch._int_mm  # int8 times int8 to int32 by the vendor's library
scaled_matmul = torch._scaled_mm  # torch's only product in FP8
grouped_matmul = torch._grouped_mm  # several products in one launch by the vendor's library
current_device = getattr(_C, "_cuda_getDevice", None)  # called at every launch; without torch.cuda's checks
current_stream = getattr(_C, "_cuda_getCurrentRawStream", None)  # called at every launch; makes no Stream object

hooks_on_every_module = [_module._global_forward_pre_hooks, _module._global_forward_hooks]
hooks_on_every_module += [_module._global_backward_pre_hooks, _module._global_backward_hooks]
"""torch's dictionaries of hooks that run before and after each module's forward and backward."""


def has_integer_matmul(device_type: str) -> bool:
    """Whether torch multiplies int8 matrices on a device type."""
    return _C._dispatch_has_kernel_for_dispatch_key("aten::_int_mm", _C._dispatch_key_for_device(device_type))


def autograd_inside_operator() -> "_C._ForceDispatchKeyGuard":
    """A context in which an operator's body on the CPU can build graphs, which the dispatcher disables there.

    torch.func does not work there if a torch mode called the operator.
    """
    excluded, keys = _C._dispatch_tls_local_exclude_set(), _C.DispatchKey
    for key in (keys.AutogradCPU, keys.AutogradCUDA, keys.AutogradXPU, keys.ADInplaceOrView):  # the last for views
        excluded = excluded.remove(key)
    return _C._ForceDispatchKeyGuard(_C._dispatch_tls_local_include_set(), excluded)


_FORWARDS = "a forward is recognised by the names in its code, and one of them is replaced; no public interface does it"
ELSEWHERE = {
    "autotune/compile.py": (1, "to run only Triton's front end, if it has no compiler for a target"),
    "autotune/compile_ahead.py": (2, "up to Triton 3.6, launchers that several threads load replace each other"),
    "bench/inputs.py": (1, "torch._foreach_copy_ restores overwritten arguments in one launch"),
    "distributed/owners.py": (2, "the module that set a hook; how FSDP2 shards gathered parameters"),
    "transformers/report.py": (1, "whether copy.deepcopy is the caller"),
    "transformers/probing/mixers.py": (1, _FORWARDS),
    "transformers/probing/norms.py": (1, _FORWARDS),
    "transformers/probing/rotary.py": (1, _FORWARDS),
    "transformers/source.py": (4, _FORWARDS),
    "transformers/rebind.py": (2, _FORWARDS),
}
"""File -> how often it names a private interface of torch, Triton or Python, and why."""
