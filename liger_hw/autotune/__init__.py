"""Finding, storing and sharing launch configurations.

Below the registry, which reads them at the first launch:
    tables, store      the text form of a table; the user cache, the shipped tables and the order in which they answer
    lock_file, notes   a pinned job's configurations; misses and failures that processes note for later ones

Above it, for `liger-hw autotune`, `compile` and `lock`:
    models, jobs       from a model, op or miss to what is tuned
    space              the legal configurations of a tunable, and which of them to try
    compile, ttir      launches recorded and compiled for a GPU that is not here; what their first IR tells
    workers            the processes that compile and measure
    record             an op's launches, on fake tensors or on the device
    clock, measure     time on a device; a kernel's launches timed, after `check` compared their results
    journal            every measurement of a search, and what of it a later run need not repeat
    tuner, static      the search by measuring; the choice by a model where there is no device
    inline, lock       tuning on a miss; writing a lock file
    compile_ahead      a model's kernels compiled beside its first forward
"""
