"""A deep model loaded with its first layers exported alone, against all of them exported.

usage: python benchmarks/repeated_layers.py [LAYERS] [ROUNDS]

Both are timed in turn, in this process, CPU seconds; the least of the rounds counts. The graphs are
compared too: they must be the same.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from gpuir.frontends.torch import hf
from gpuir.frontends.torch.load import load
from gpuir.frontends.torch.program import TorchProgram
from gpuir.ir.graph import Graph

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 512,
}


def timed(program: TorchProgram) -> tuple[float, Graph]:
    begun = time.process_time()
    graph = load(program).graph
    return time.process_time() - begun, graph


def main(layers: int = 64, rounds: int = 2) -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = {**LLAMA, "num_hidden_layers": layers}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        made = hf.program(folder, dims={"batch": 1, "seq": 16})
    few, whole = [], []
    for _ in range(rounds):
        few.append(timed(made))
        whole.append(timed(replace(made, repeats=False)))
    assert few[0][1].nodes == whole[0][1].nodes, "not the same graph"
    a, b = (min(seconds for seconds, _ in x) for x in (few, whole))
    print(f"{layers} layers: {a:.2f} s, all exported {b:.2f} s: {b / a:.1f} times as long")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
