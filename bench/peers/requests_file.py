"""Requests as `tessera-bench --dump-ids` wrote them: the same ids for every system.

One line of JSON (sizes, features, a checksum), then little-endian arrays without padding: for each
request and feature uint64 offsets[batch + 1], int64 ids, float32 weights where weighted; after the
features of a request, where `dense` is above 0, float32 dense[batch, dense] and labels[batch].
"""

import json
import zlib
from dataclasses import dataclass

import numpy as np


@dataclass
class Request:
    offsets: list  # a feature: uint64 (batch + 1)
    ids: list  # a feature: int64
    dense: np.ndarray  # float32 (batch, dense)
    labels: np.ndarray  # float32 (batch)


@dataclass
class Requests:
    batch: int
    dense: int
    rows: list  # a feature (and table: the two are one here)
    dims: list
    requests: list


def load(path):
    """Reads a file of requests; a damaged or weighted one is an error."""
    with open(path, "rb") as file:
        header = json.loads(file.readline())
        body = file.read()
    if header["format"] != "tessera-bench-ids-1" or zlib.crc32(body) != header["crc32"]:
        raise ValueError(f"{path} is damaged or of another version")
    features = header["features"]
    if any(feature["weighted"] for feature in features):
        raise ValueError(f"{path}: weights of ids are not compared")
    if [feature["table"] for feature in features] != list(range(len(features))):
        raise ValueError(f"{path}: every feature needs a table of its own")
    at = 0

    def take(kind, count):
        nonlocal at
        array = np.frombuffer(body, kind, count, at)
        at += array.nbytes
        return array.copy()

    batch, dense = header["batch"], header["dense"]
    requests = []
    for _ in range(header["requests"]):
        offsets, ids = [], []
        for _ in features:
            offsets.append(take("<u8", batch + 1))
            ids.append(take("<i8", int(offsets[-1][-1])))
        values, labels = np.zeros((batch, 0), np.float32), np.zeros(batch, np.float32)
        if dense:
            values = take("<f4", batch * dense).reshape(batch, dense)
            labels = take("<f4", batch)
        requests.append(Request(offsets, ids, values, labels))
    if at != len(body):
        raise ValueError(f"{path}: {len(body) - at} bytes are left over")
    rows = [feature["rows"] for feature in features]
    return Requests(batch, dense, rows, [feature["dim"] for feature in features], requests)
