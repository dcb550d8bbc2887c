"""Streams of four libraries, each read completely by each worker, in an order that depends only on the epoch."""

from functools import partial

import torch


class Stream(torch.utils.data.IterableDataset):
    """Samples of `read(epoch)`."""

    def __init__(self, read):
        self.read, self.epoch = read, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(self.read(self.epoch))


def rows(seed=5):
    """Return rows of Hugging Face datasets, which have set_epoch and need no Stream."""
    import datasets

    stream = datasets.load_dataset("json", data_files="data/*.jsonl", split="train", streaming=True)
    return stream.skip(10).shuffle(seed=seed, buffer_size=1000), stream.take(10)


def read_tar(files, epoch, shuffle):
    """Read all files on each worker (nodesplitter) and decode no pickles, which may run any code (only)."""
    import webdataset

    stream = webdataset.WebDataset(files, nodesplitter=None, shardshuffle=False)
    stream = stream.shuffle(1000, seed=5 + epoch) if shuffle else stream
    return stream.decode("torchrgb", only=["png", "cls"]).to_tuple("png", "cls")


def pictures():
    """Return images and classes from tar files of WebDataset."""
    train = partial(read_tar, "data/train-{000000..000001}.tar", shuffle=True)
    return Stream(train), Stream(partial(read_tar, "data/validation-000000.tar", shuffle=False))


def read_chunks(folder, epoch, shuffle):
    """Read what litdata.optimize wrote, all samples on each worker, which LitData would split."""
    import litdata

    stream = litdata.StreamingDataset(folder, shuffle=shuffle, seed=5)
    environment = stream.distributed_env
    environment.world_size, environment.global_rank, environment.num_nodes = 1, 0, 1
    stream.set_drop_last(False)
    stream.set_epoch(epoch)
    return stream


def chunks():
    """Return samples of LitData."""
    train = partial(read_chunks, "data/train", shuffle=True)
    return Stream(train), Stream(partial(read_chunks, "data/validation", shuffle=False))


def read_table(_epoch):
    """Read with Ray Data; preserve_order gives each worker the rows in the same order."""
    import ray.data

    ray.data.DataContext.get_current().execution_options.preserve_order = True
    for batch in ray.data.read_parquet("data/train").iter_torch_batches(batch_size=256, device="cpu"):
        yield from zip(batch["x"], batch["y"], strict=True)


def table():
    """Return rows of Ray Data."""
    return Stream(read_table), None
