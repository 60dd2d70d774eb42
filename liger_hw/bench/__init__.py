"""Workloads -> timings -> table, JSON and plots: what `liger-hw bench` runs, as functions.

timing.py         how a call is measured: graph replay, eager wall time, host time, memory, floors
inputs.py         the inputs of a call, in as many sets as keep them out of L2
cases.py          what is measured: an op at sizes
peers/            the same computation by torch, torch.compile and Liger
accuracy.py       error of an arm against the reference in fp64
floors.py         the least time a case can take
ops.py            case x peer -> rows
moe.py            the experts of a layer as cases, and what their table shows besides
report.py         machine facts, table, JSON
plots.py          plots
training.py       one Hugging Face model trained under one arm
agreement.py      whether two trainings agree
e2e.py            real Hugging Face models, trained
"""
