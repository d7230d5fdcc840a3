"""torch's DataLoader, without workers: they were slower for data in memory.

samples   of a Dataset of samples, which it collates; numpy rows, faster than a TensorDataset's
batches   of a Dataset that gathers whole batches itself, given their row numbers
"""

from __future__ import annotations

import input_job
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler


class Samples(Dataset):
    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, row):
        return int(self.labels[row]), self.images[row]


class Batches(Dataset):
    def __init__(self, images, labels):
        self.images, self.labels = torch.from_numpy(images), torch.from_numpy(labels)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, rows):
        index = torch.tensor(rows)
        return self.labels.index_select(0, index), self.images.index_select(0, index)


def main() -> None:
    arguments = input_job.start()
    torch.set_num_threads(arguments.threads)
    arrays = input_job.memory(arguments)
    size = input_job.BATCH[arguments.kind]

    def open_files() -> input_job.Pass:
        if arguments.form == "samples":
            loader = DataLoader(Samples(*arrays), batch_size=size, shuffle=True)
        else:
            rows = Batches(*arrays)
            sampler = BatchSampler(RandomSampler(rows), size, drop_last=False)
            loader = DataLoader(rows, sampler=sampler, batch_size=None)
        return lambda epoch: iter(loader)

    input_job.measure(arguments, open_files)


if __name__ == "__main__":
    main()
