"""Linear layers in the memory layout that the CPU's matrix kernels want.

In bfloat16, oneDNN rearranges a plain weight matrix at every call, which for the few tokens of a
decoding step costs more than the product itself. Frozen weights are rearranged once instead. The
products are the same to the bit. The rearranged weights are a second copy in memory; the plain
ones stay with the model, which is left as it was.
"""

import copy
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class PackedLinear(nn.Module):
    """A frozen linear layer with rearranged weights."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Rearrange a weight, [out, in], for which `can_pack` holds."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.weight = weight.detach()  # T5 asks its layers for their dtype
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return torch.ops.mkldnn._linear_pointwise(inputs, self._packed, self.bias, "none", [], "")


def can_pack(weight: Tensor) -> bool:
    """Whether rearranging is possible here and pays: bfloat16 on a CPU with oneDNN."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and weight.dim() == 2
        and torch.backends.mkldnn.is_available()
        and _works()
    )


def fast_linear(weight: Tensor, bias: Tensor | None = None) -> nn.Module:
    """A frozen linear layer with this weight, [out, in], rearranged where that pays."""
    if can_pack(weight):
        return PackedLinear(weight, bias)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return linear


def fast_twin(module: nn.Module) -> nn.Module:
    """The same module with its linear layers rearranged where that pays; for inference only.

    Everything but the rearranged weights is shared with `module`, which does not change.
    """
    if _is_plain(module):
        return fast_linear(module.weight, module.bias)
    twin = plain_twin(module)
    for parent in list(twin.modules()):
        for name, child in parent.named_children():
            if _is_plain(child) and can_pack(child.weight):
                setattr(parent, name, PackedLinear(child.weight, child.bias))
    return twin


def plain_twin(module: nn.Module) -> nn.Module:
    """The same module, of modules of its own around shared tensors."""
    # A quantised layer keeps more than tensors, so it is shared as a whole
    layers = [m for m in module.modules() if isinstance(m, nn.Linear) and not _is_plain(m)]
    shared = [*module.parameters(), *module.buffers(), *layers]
    return copy.deepcopy(module, {id(part): part for part in shared})


def _is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Only the layer itself: what is derived from it may do more than a product."""
    return type(module) is nn.Linear


_checked: list[bool] = []


def _works() -> bool:
    """Whether this build of torch has the kernels and they agree with the plain product; once."""
    if not _checked:
        weight = torch.linspace(-1, 1, 64 * 32).view(64, 32).bfloat16()
        inputs = torch.linspace(-1, 1, 3 * 32).view(3, 32).bfloat16()
        try:
            with torch.no_grad():
                same = torch.allclose(
                    PackedLinear(weight)(inputs).float(), F.linear(inputs, weight).float(), 1e-2
                )
        except (AttributeError, RuntimeError, TypeError):
            same = False
        _checked.append(same)
    return _checked[0]
