"""Finds data loaders that begin anew after a restart, and says so before samples are repeated."""

from __future__ import annotations

import gc

from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from elaunch.trainer.data.order import BatchSampler


def sentence_about_loaders() -> str:
    """What happens to the samples of this program's shuffling DataLoaders, and the way out; "" if there is none.

    A loader that does not shuffle is taken for one that evaluates. One with `Order.batches` needs nothing.
    """
    # `type`, since isinstance would ask lazy objects for their class.
    found = [one for one in gc.get_objects() if type(one) is DataLoader]
    if not any(_shuffles(one) and not isinstance(one.batch_sampler, BatchSampler) for one in found):
        return ""
    return (
        "a DataLoader of this program shuffles, and its position is not kept: after a restart it begins anew, and "
        "samples come twice or never. One line ends that: batches = elaunch.trainer.Batches(loader), given as "
        "per_rank=batches; the loop takes next(batches). per_rank=() says that the order needs nothing"
    )


def _shuffles(loader: DataLoader[object]) -> bool:
    sampler = loader.sampler
    return isinstance(sampler, RandomSampler) or (isinstance(sampler, DistributedSampler) and sampler.shuffle)
