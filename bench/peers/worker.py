"""One peer doing one kind of work on the requests of a file, at the command of run.py.

Makes the system, runs every request once, prints `ready`; then for every number n on standard
input serves n requests and prints a JSON list of their times in milliseconds.

Systems: `torch` (nn.EmbeddingBag, nn.Linear, torch.optim) and `fbgemm` (FBGEMM's CPU table-batched
embeddings with its fused optimizers, PyTorch for the dense layers).
Work: `lookup`, `update` (forward, backward, optimizer) and `step` (a whole training step).
"""

import argparse
import json
import sys
import time

import numpy as np
import torch
from torch import nn

import requests_file

LR = 0.01
EPS = 1e-8


class TorchTables(nn.Module):
    """A table a feature; pooled vectors (batch, sum of dims)."""

    def __init__(self, file, optimizer):
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(rows, dim, mode="sum", sparse=True, include_last_offset=True)
            for rows, dim in zip(file.rows, file.dims)
        )
        for bag in self.bags:
            nn.init.uniform_(bag.weight, -bag.num_embeddings**-0.5, bag.num_embeddings**-0.5)
        kinds = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}
        more = {"eps": EPS} if optimizer == "adagrad" else {}
        self.optimizer = kinds[optimizer](self.parameters(), lr=LR, **more)

    def ids(self, request):
        offsets = [torch.from_numpy(offsets.astype(np.int64)) for offsets in request.offsets]
        return [torch.from_numpy(ids) for ids in request.ids], offsets

    def forward(self, ids):
        return torch.cat([bag(*pair) for bag, pair in zip(self.bags, zip(*ids))], 1)


class FbgemmTables(nn.Module):
    """The same in one operator; its backward moves the rows."""

    def __init__(self, file, optimizer):
        super().__init__()
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            EmbeddingLocation,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        kinds = {
            "sgd": EmbOptimType.EXACT_SGD,
            "adagrad": EmbOptimType.EXACT_ADAGRAD,
            "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        }
        place = (EmbeddingLocation.HOST, ComputeDevice.CPU)
        self.tables = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, dim, *place) for rows, dim in zip(file.rows, file.dims)],
            optimizer=kinds[optimizer],
            learning_rate=LR,
            eps=EPS,
        )
        self.tables.init_embedding_weights_uniform(-0.01, 0.01)
        self.optimizer = None

    def ids(self, request):
        starts = np.cumsum([0] + [len(ids) for ids in request.ids])
        offsets = [o.astype(np.int64)[:-1] + s for o, s in zip(request.offsets, starts)]
        offsets = np.concatenate(offsets + [starts[-1:]])
        return torch.from_numpy(np.concatenate(request.ids)), torch.from_numpy(offsets)

    def forward(self, ids):
        return self.tables(*ids)


def mlp(inputs, widths, relu_last):
    layers = []
    for i, width in enumerate(widths):
        layers.append(nn.Linear(inputs, width))
        if relu_last or i + 1 < len(widths):
            layers.append(nn.ReLU())
        inputs = width
    return nn.Sequential(*layers)


class Dot(nn.Module):
    """The dense vector, then the products of all pairs of vectors."""

    def __init__(self, file):
        super().__init__()
        self.vectors, self.dim = len(file.dims) + 1, file.dims[0]
        self.i, self.j = torch.tril_indices(self.vectors, self.vectors, -1)
        self.width = self.dim + self.vectors * (self.vectors - 1) // 2

    def forward(self, dense, pooled):
        x = torch.cat([dense, pooled], 1).view(-1, self.vectors, self.dim)
        products = torch.bmm(x, x.transpose(1, 2))[:, self.i, self.j]
        return torch.cat([dense, products], 1)


class Dcn(nn.Module):
    """Cross layers of low rank: x0 * (W (V x) + b) + x."""

    def __init__(self, file, dense, layers, rank):
        super().__init__()
        self.width = dense + sum(file.dims)
        self.v = nn.ModuleList(nn.Linear(self.width, rank, bias=False) for _ in range(layers))
        self.w = nn.ModuleList(nn.Linear(rank, self.width) for _ in range(layers))

    def forward(self, dense, pooled):
        x0 = x = torch.cat([dense, pooled], 1)
        for v, w in zip(self.v, self.w):
            x = torch.addcmul(x, x0, w(v(x)))
        return x


class Model(nn.Module):
    """A DLRM or DCNv2 over some tables."""

    def __init__(self, file, args):
        super().__init__()
        bottom, top = args.bottom, args.top
        self.bottom = mlp(file.dense, bottom, True)
        if args.model == "dot":
            self.join = Dot(file)
        else:
            self.join = Dcn(file, bottom[-1], args.dcn_layers, args.dcn_rank)
        self.top = mlp(self.join.width, top, False)

    def forward(self, dense, pooled):
        return self.top(self.join(self.bottom(dense), pooled)).squeeze(1)


def work(args, file):
    """The function that serves a request, and the requests as it wants them."""
    tables = {"torch": TorchTables, "fbgemm": FbgemmTables}[args.system](file, args.optimizer)
    ids = [tables.ids(request) for request in file.requests]
    if args.work == "lookup":

        def lookup(ids):
            with torch.no_grad():
                tables(ids)

        return lookup, [(each,) for each in ids]
    if args.work == "update":
        grad = torch.randn(file.batch, sum(file.dims)) * 0.003

        def update(ids):
            if tables.optimizer:
                tables.optimizer.zero_grad(set_to_none=True)
            tables(ids).backward(grad)
            if tables.optimizer:
                tables.optimizer.step()

        return update, [(each,) for each in ids]

    model = Model(file, args)
    loss = nn.BCEWithLogitsLoss()
    kinds = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}
    more = {"eps": EPS} if args.dense_optimizer == "adagrad" else {}
    dense_optimizer = kinds[args.dense_optimizer](model.parameters(), lr=LR, **more)

    def step(ids, dense, labels):
        dense_optimizer.zero_grad(set_to_none=True)
        if tables.optimizer:
            tables.optimizer.zero_grad(set_to_none=True)
        loss(model(dense, tables(ids)), labels).backward()
        dense_optimizer.step()
        if tables.optimizer:
            tables.optimizer.step()

    more = [(torch.from_numpy(r.dense), torch.from_numpy(r.labels)) for r in file.requests]
    return step, [(each, *rest) for each, rest in zip(ids, more)]


def main():
    widths = lambda text: [int(width) for width in text.split("-")]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--system", choices=["torch", "fbgemm"], required=True)
    parser.add_argument("--work", choices=["lookup", "update", "step"], required=True)
    parser.add_argument("--ids", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--dense-optimizer", default="sgd")
    parser.add_argument("--model", choices=["dot", "dcn"], default="dot")
    parser.add_argument("--bottom", type=widths)
    parser.add_argument("--top", type=widths)
    parser.add_argument("--dcn-layers", type=int, default=3)
    parser.add_argument("--dcn-rank", type=int, default=512)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    file = requests_file.load(args.ids)
    serve, requests = work(args, file)
    for request in requests:
        serve(*request)
    print("ready", flush=True)
    number = 0
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            start = time.perf_counter()
            serve(*requests[number % len(requests)])
            times.append(1e3 * (time.perf_counter() - start))
            number += 1
        print(json.dumps(times), flush=True)


if __name__ == "__main__":
    main()
