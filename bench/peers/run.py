"""Tessera against PyTorch and FBGEMM on this machine: the same work in interleaved runs.

For each case: tessera-bench draws the requests and writes them to a file; a process for each peer
reads that file; then ours and theirs take turns, round after round (A B C A B C ...), so that
whatever else the machine does slows all of them alike. A ratio is theirs over ours, of the median
times of one round; printed is the median of the rounds' ratios, with the smallest and largest.

    python run.py --tessera ../../target/release/tessera-bench [--only lookup,step-16] [--rounds 7]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent


@dataclass
class Case:
    """Knobs of ours, and for each peer what it is asked to do."""

    name: str
    work: str  # lookup, update, step
    knobs: list
    peers: list  # (system, optimizer of its tables)
    dense: list = field(default_factory=list)  # knobs of the dense layers, the same on both sides
    least: float = 0.0  # ratio to the best of the peers that is aimed at
    best_of: tuple = ()  # peers that the aim is about; all when empty
    iterations: int = 20
    limit: float = 0.0  # share of the gather limit that is aimed at


LOOKUP = ["--tables", "8", "--rows", "1000000", "--dim", "64", "--batch", "2048", "--pooling", "20"]
STEP = ["--tables", "26", "--rows", "100000", "--batch", "2048", "--pooling", "1", "--alpha", "1.2"]


def cases(table_set):
    """The cases of the project's speed targets."""
    lookup_peers = [("fbgemm", "sgd"), ("torch", "sgd")]
    step_peers = [("fbgemm", "rowwise_adagrad"), ("torch", "sgd")]
    dcn = ["--table-set", table_set, "--rows-max", "100000", "--dim", "128", "--batch", "1024"]
    return [
        Case("lookup", "lookup", LOOKUP, [("fbgemm", "sgd")], least=3.5, limit=0.9),
        Case("lookup-torch", "lookup", LOOKUP, [("torch", "sgd")], least=1.8, limit=0.9),
        Case("lookup-zipf", "lookup", LOOKUP + ["--alpha", "1.05"], lookup_peers, limit=0.9),
        Case(
            "update",
            "update",
            LOOKUP + ["--optimizer", "rowwise_adagrad"],
            [("fbgemm", "rowwise_adagrad")],
            least=15,
            iterations=5,
        ),
        Case(
            "update-sgd",
            "update",
            LOOKUP + ["--optimizer", "sgd"],
            lookup_peers,
            least=4,
            iterations=5,
        ),
        Case(
            "step-16",
            "step",
            STEP + ["--dim", "16"],
            step_peers,
            dense=["--bottom", "512-256-16", "--top", "512-256-1"],
            least=1.8,
        ),
        Case(
            "step-128",
            "step",
            STEP + ["--dim", "128"],
            step_peers,
            dense=["--bottom", "512-256-128", "--top", "1024-1024-512-256-1"],
            least=1.7,
            iterations=8,
        ),
        Case(
            "dcn",
            "step",
            dcn + ["--alpha", "1.2", "--optimizer", "adagrad"],
            [("torch", "adagrad"), ("fbgemm", "adagrad")],
            dense=[
                *("--model", "dcn", "--bottom", "512-256-128", "--top", "1024-1024-512-256-1"),
                *("--dcn-layers", "3", "--dcn-rank", "512", "--dense-optimizer", "adagrad"),
            ],
            least=1.5,
            best_of=("torch",),
            iterations=4,
        ),
    ]


class Ours:
    """tessera-bench, a process a round."""

    def __init__(self, program, case, threads):
        self.command = [program, case.work, *case.knobs, *case.dense, "--threads", str(threads)]

    def run(self, iterations, more=()):
        command = [*self.command, "--iterations", str(iterations), "--json", *more]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)}\n{done.stderr}")
        return json.loads(done.stdout)["points"][0]


class Peer:
    """A worker process that lives through all rounds."""

    def __init__(self, python, case, system, optimizer, ids, threads):
        command = [python, str(HERE / "worker.py"), "--system", system, "--work", case.work]
        command += ["--ids", ids, "--threads", str(threads), "--optimizer", optimizer, *case.dense]
        # An idle peer must not spin on the cores that another one is measured on.
        environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
        self.name = f"{system} {optimizer}"
        self.system = system
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        # Libraries may print on standard output while they load.
        for line in self.process.stdout:
            if line.strip() == "ready":
                return
        self.process.wait()
        sys.exit(f"{' '.join(command)}\nended before it was ready (its message is above)")

    def run(self, iterations):
        self.process.stdin.write(f"{iterations}\n")
        self.process.stdin.flush()
        return statistics.median(json.loads(self.process.stdout.readline()))

    def stop(self):
        self.process.stdin.close()
        self.process.wait()


def without_ids(knobs):
    """The knobs without those that draw ids: the file has them."""
    kept, skip = [], False
    for knob in knobs:
        if not skip and knob != "--alpha":
            kept.append(knob)
        skip = knob == "--alpha"
    return kept


def measure(case, args):
    """Runs a case and gives its figures."""
    with tempfile.TemporaryDirectory() as folder:
        ids = os.path.join(folder, "requests.ids")
        Ours(args.tessera, case, args.threads).run(1, ["--warmup", "0", "--dump-ids", ids])
        ours = Ours(args.tessera, case, args.threads)
        ours.command = [ours.command[0], case.work, *without_ids(case.knobs), *case.dense]
        ours.command += ["--threads", str(args.threads), "--ids", ids]
        peers = [
            Peer(args.python, case, system, optimizer, ids, args.threads)
            for system, optimizer in case.peers
        ]
        rounds = []
        for _ in range(args.rounds):
            point = ours.run(case.iterations * 2)
            # Shares of the limit come from a run of their own: its passes of the limit between
            # requests push hot rows out of the caches.
            paired = ours.run(case.iterations * 2, ["--pair"]) if case.limit else point
            times = {peer.name: peer.run(case.iterations) for peer in peers}
            rounds.append((point, paired, times))
        for peer in peers:
            peer.stop()
    ours_ms = [statistics.median(point["service_ms"]) for point, _, _ in rounds]
    middle = statistics.median
    result = {
        "case": case.name,
        "ours_ms": middle(ours_ms),
        "samples_per_s": middle(point["samples_per_s"] for point, _, _ in rounds),
        "rows_per_s": middle(point["rows_per_s"] for point, _, _ in rounds),
        "share_of_limit": middle(point["share_of_limit"] for _, point, _ in rounds),
        "lookup_share_of_limit": middle(point["lookup_share_of_limit"] for _, point, _ in rounds),
        "share_aimed_at": case.limit,
        "peers": [],
    }
    for peer in peers:
        times = [times[peer.name] for _, _, times in rounds]
        ratios = [theirs / mine for theirs, mine in zip(times, ours_ms)]
        result["peers"].append(
            {
                "peer": peer.name,
                "ms": middle(times),
                "ratio": middle(ratios),
                "ratio_least": min(ratios),
                "ratio_most": max(ratios),
                "aim": case.least if not case.best_of or peer.system in case.best_of else 0.0,
            }
        )
    return result


def show(result):
    print(
        f"{result['case']:<13} ours {result['ours_ms']:9.2f} ms, "
        f"{result['samples_per_s']:9.0f} samples/s, {result['rows_per_s'] / 1e6:6.2f} Mrows/s, "
        f"{result['share_of_limit']:.2f} of the gather limit "
        f"(lookup alone {result['lookup_share_of_limit']:.2f}"
        + (f", aim {result['share_aimed_at']})" if result["share_aimed_at"] else ")")
    )
    for peer in result["peers"]:
        aim = f", aim {peer['aim']}" if peer["aim"] else ""
        print(
            f"{'':<13} {peer['peer']:<22} {peer['ms']:9.2f} ms, ratio {peer['ratio']:6.2f} "
            f"({peer['ratio_least']:.2f} to {peer['ratio_most']:.2f}){aim}",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tessera", required=True, help="the tessera-bench program, built --release")
    parser.add_argument("--python", default=sys.executable, help="an interpreter with the peers")
    parser.add_argument("--only", default="", help="cases, by commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--table-set",
        default=os.path.join(os.environ.get("TESSERA_SHARED", "../shared"), "data/table-configs/criteo_tables.csv"),
        help="csv of the MLPerf tables",
    )
    parser.add_argument("--json", help="file for the figures")
    args = parser.parse_args()
    known = cases(args.table_set)
    wanted = [name for name in args.only.split(",") if name]
    unknown = [name for name in wanted if name not in [case.name for case in known]]
    if unknown:
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(c.name for c in known)}")
    results = []
    for case in known:
        if not wanted or case.name in wanted:
            results.append(measure(case, args))
            show(results[-1])
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
