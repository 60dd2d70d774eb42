"""Activation memory as a dial: what backward needs is kept, or computed again, by level.

    with liger_hw.activations("cheap"):                    # whatever runs in the block, with our ops
        loss = model(**batch).loss
    loss.backward()

    dial = liger_hw.activations("fit", model)              # each layer of a model, until dial.revert()

recipes.py is the mechanism, levels.py the settings a user may give, dial.py gives the layers of a model their levels,
planner.py chooses them. docs/activations.md explains.
"""
