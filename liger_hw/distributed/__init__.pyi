# Made by `python ci/stubs.py`; do not edit.
from liger_hw.distributed.agreement import digest as digest
from liger_hw.distributed.agreement import facts_of as facts_of
from liger_hw.distributed.agreement import sync as sync
from liger_hw.distributed.owners import head_loss as head_loss
