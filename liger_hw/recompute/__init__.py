"""Activation memory by levels: which tensors are kept for backward, and which it computes again (docs/activations.md).

    with liger_hw.activations("cheap"):          # for liger_hw's ops in the block
        loss = model(**batch).loss
    loss.backward()

    dial = liger_hw.activations("fit", model)    # for each layer of a model, until dial.revert()

recipes.py is the mechanism, levels.py parses settings, dial.py sets the levels of layers, planner.py chooses them.
"""
