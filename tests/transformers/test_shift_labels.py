"""`labels` and `shift_labels` together, as context parallelism of transformers' Trainer gives them, in every family.

Some families' loss takes `shift_labels`; others' forward swallows it in `**kwargs` and takes `labels`.
"""

from __future__ import annotations

import pytest
import torch
import transformers

import liger_hw
from liger_hw.transformers.models import specs
from liger_hw.transformers.tiny import tiny_model

NAMED = sorted({model for spec in specs().values() for model in spec.models if "For" in model})
SEQ2SEQ = [
    f"{name}For{task}"
    for name in ("Bart", "BigBirdPegasus", "Blenderbot", "BlenderbotSmall", "MBart", "Marian", "Pegasus", "PLBart")
    for task in ("CausalLM", "ConditionalGeneration")
] + ["MvpForCausalLM", "MvpForConditionalGeneration", "M2M100ForConditionalGeneration", "T5ForConditionalGeneration"]
SEQ2SEQ += ["LongT5ForConditionalGeneration", "MT5ForConditionalGeneration", "UMT5ForConditionalGeneration"]
SEQ2SEQ = [name.replace("MarianForConditionalGeneration", "MarianMTModel") for name in SEQ2SEQ]
DAILY = (
    *("LlamaForCausalLM", "GptOssForCausalLM", "Gemma3ForConditionalGeneration", "Qwen2VLForConditionalGeneration"),
    *("BartForCausalLM", "BartForConditionalGeneration", "MarianMTModel", "MvpForConditionalGeneration"),
    *("M2M100ForConditionalGeneration", "T5ForConditionalGeneration", "PegasusForCausalLM"),
)
"""One of each way that a family's forward takes or passes on `shift_labels`."""
PARTS = ("rope", "rms_norm", "layer_norm", "swiglu", "geglu", "relu_squared", "experts")
LOSS_ALONE = {**dict.fromkeys(PARTS, False), "activations": "keep"}


def trained(model, ids, labels):
    """(loss, sum of the squares of all gradients)"""
    torch.manual_seed(0)
    model.zero_grad()
    loss = model(input_ids=ids, **labels).loss
    loss.backward()
    return loss.detach(), sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)


@pytest.mark.daily(class_name=DAILY)
@pytest.mark.parametrize("class_name", [*NAMED, *SEQ2SEQ])
def test_both_labels_train_as_they_do_unpatched(class_name):
    if not hasattr(transformers, class_name):
        pytest.skip(f"transformers {transformers.__version__} has no {class_name}")
    sizes = {"decoder_start_token_id": 1} if class_name in SEQ2SEQ else {}
    model = tiny_model(getattr(transformers, class_name), **sizes)
    ids = torch.randint(5, 60, (2, 10), generator=torch.Generator().manual_seed(1))
    labels = torch.cat([ids.new_full((2, 3), -100), ids[:, 3:]], dim=1)
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    pairs = {"labels": labels, "shift_labels": shifted}, {"labels": shifted, "shift_labels": labels}
    try:
        expected = [trained(model, ids, both) for both in pairs]
    except (RuntimeError, TypeError, AttributeError) as error:
        # transformers 4 passes shift_labels on in few families; 5.24.0's Llama4ForConditionalGeneration cannot train
        pytest.skip(f"the unpatched model does not train so: {error}")
    with liger_hw.patch(model, **LOSS_ALONE):
        for both, figures in zip(pairs, expected):
            torch.testing.assert_close(trained(model, ids, both), figures, rtol=1e-3, atol=1e-6)
