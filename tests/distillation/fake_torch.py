"""The few functions of PyTorch that a teacher of Hugging Face uses, on NumPy arrays.

The tests' environment has no PyTorch; tests/references/hugging_face_teacher.py compares with it.
"""

import contextlib

import numpy as np


class Tensor:
    """An array with the methods that are used."""

    def __init__(self, array):
        self.array = np.asarray(array)
        self.shape = self.array.shape

    def __getitem__(self, item):
        return Tensor(self.array[item])

    def __sub__(self, other):
        return Tensor(self.array - other.array)

    def float(self):
        return Tensor(self.array.astype(np.float32))

    def cpu(self):
        return self

    def numpy(self):
        return self.array

    def scatter(self, dim, index, value):
        changed = self.array.copy()
        np.put_along_axis(changed, index.array, value, dim)
        return Tensor(changed)


def as_tensor(array, device):
    assert device == "cpu"
    return Tensor(array)


@contextlib.contextmanager
def inference_mode():
    yield


def logsumexp(x, dim):
    return Tensor(np.logaddexp.reduce(x.array, axis=dim))


def topk(x, k, dim):
    ids = np.argsort(-x.array, axis=dim, kind="stable")[..., :k]
    return Tensor(np.take_along_axis(x.array, ids, dim)), Tensor(ids)
