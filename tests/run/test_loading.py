"""What kinds of models there are, which options each takes, and training steps as an option."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import gpuir
from gpuir.ir.errors import UsageError
from gpuir.ops import kernel as k
from gpuir.ops import tensor as t
from gpuir.run.loading import is_torch

ENCODER = str(Path(__file__).parents[2] / "tests" / "encoder.onnx")
DIMS = {"batch": 2, "seq": 16}


@pytest.mark.parametrize(
    ("path", "torch"),
    [
        ("model.pt2", True),
        ("hf:config.json", True),
        ("my.module:build", True),
        ("folder/model.py:build", True),
        ("model.onnx", False),
        ("model.gir", False),
        ("strange:name.onnx", False),
    ],
)
def test_the_name_tells_what_made_it(path: str, torch: bool):
    assert is_torch(path) is torch


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"task": "causal-lm"}, "task cannot be given for an ONNX file"),
        ({"optimizer": "adamw"}, "add --train"),
        ({"train": True, "autodiff": "jax"}, "autodiff 'jax' is unknown"),
        ({"train": True, "autodiff": "torch", "autocast": "bf16"}, "--autodiff gpuir"),
        ({"train": True, "fused": True}, "--optimizer"),
        ({"fast_norms": True}, "--autocast"),
        ({"autocast": "f8"}, "'f8' is not supported"),
        ({"train": True, "checkpoint": "every=none"}, "every=2"),
        ({"train": True, "checkpoint": "every=" + "9" * 5000}, "every=2"),
        ({"train": True, "optimizer": "adamm"}, "adam"),
    ],
)
def test_what_makes_no_sense_is_refused(options: gpuir.LoadOptions, says: str):
    with pytest.raises(gpuir.GpuirError, match=says):
        gpuir.load(ENCODER, dims=DIMS, **options)


def test_mixed_precision_is_of_a_run_too():
    graph = gpuir.load(ENCODER, dims=DIMS, autocast="f16", fast_norms=True)
    fast = gpuir.pipeline("autocast{dtype=f16,fast_norms=true}")
    assert gpuir.show(graph) == gpuir.show(fast.run(gpuir.load(ENCODER, dims=DIMS)))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dims": {"batch": "x"}}, "dims={'batch': 'x'}"),
        ({"dims": {"batch": 1.5}}, "dims={'batch': 1.5}"),
        ({"dims": {"batch": -1}}, "dims={'batch': -1}"),
        ({"dims": {"batch": None}}, "dims={'batch': None}"),
        ({"dims": 8}, "dims=8"),
        ({"trip_counts": {"loop": "10"}}, "trip_counts={'loop': '10'}"),
        ({"inputs": {"x": "8x4"}}, "inputs={'x': '8x4'}"),
        ({"inputs": {"x": (8, "y")}}, "inputs={'x': (8, 'y')}"),
        ({"kwargs": [1]}, "kwargs=[1]"),
        ({"converters": {"mylib::op": 1}}, "converters={'mylib::op': 1}"),
        ({"train": "yes"}, "train='yes'"),
        ({"train": True, "autodiff": True}, "autodiff=True"),
        ({"train": True, "checkpoint": True}, "checkpoint=True"),
        ({"train": True, "autocast": int}, "autocast=<class 'int'>"),
        ({"train": True, "optimizer": print}, "optimizer=<built-in function print>"),
        ({"dtype": 16}, "dtype=16"),
        ({"task": 3}, "task=3"),
        ({"past": 1.5}, "past=1.5"),
        ({"expert_skew": "x"}, "expert_skew='x'"),
    ],
)
def test_what_is_of_another_kind_is_refused(options: gpuir.LoadOptions, says: str):
    with pytest.raises(UsageError) as caught:
        gpuir.load(ENCODER, **{"dims": DIMS, **options})
    assert caught.value.found == says


def test_a_profile_is_a_name_or_a_path():
    with pytest.raises(UsageError, match="profile=3"):
        gpuir.analyze(ENCODER, "a100", dims=DIMS, profile=3).graph  # pyright: ignore[reportArgumentType]


def test_a_number_of_numpy_is_one(tmp_path: Path):
    np = pytest.importorskip("numpy")
    with pytest.raises(gpuir.GpuirError, match="no such file"):
        gpuir.load("no.onnx", dims={"batch": np.int64(8)})


def test_a_model_in_memory():
    onnx = pytest.importorskip("onnx")
    node = onnx.helper.make_node("Relu", ["x"], ["y"])
    x, y = (onnx.helper.make_tensor_value_info(n, 1, ["batch", 4]) for n in "xy")
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "g", [x], [y]))
    for source in (model, model.SerializeToString()):
        graph = gpuir.analyze(source, "a100", dims={"batch": 8}).graph
        assert graph.inputs[0].type.shape == (8, 4)


FILES = {  # what is in it, and what the error says
    "one.py": ("def build(): ...\ndef _inner(): ...", "one.py:build"),
    "two.py": ("def a(): ...\ndef b(): ...\nraise SystemExit", "a, b"),
    "bad.py": ("def (", "a function that returns"),
    "weights.safetensors": ("", "torch.export.save"),
    "weights.pt": ("", "torch.export.save"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_may_lead_to_a_model_says_how(name: str, tmp_path: Path):
    text, says = FILES[name]
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError) as caught:
        gpuir.load(tmp_path / name)
    assert says in str(caught.value) and "ONNX" not in str(caught.value)


def test_a_training_step_of_an_onnx_file():
    plain = gpuir.load(ENCODER, dims=DIMS)
    step = gpuir.load(ENCODER, dims=DIMS, train=True, optimizer="sgd", fused=True)
    weights = {v.name for v in plain.params if v.type.dtype.is_float}
    gradients = {name for name, role in step.roles if role == "gradient"}
    assert gradients <= {f"{name}.grad" for name in weights}
    assert {v.name for v in step.over if v} <= weights
    assert len(gradients) > 30
    forward, both = (sum(n.op.flops() for n in g.walk()) for g in (plain, step))
    assert 2.5 * forward < both < 3.5 * forward


def test_both_ways_to_the_gradients_launch_the_same_products():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    x = torch.randn(2, 8, 32)
    kinds: list[Counter[str]] = []
    for how in ("torch", "gpuir"):
        g = gpuir.load(layer, args=(x,), train=True, autodiff=how)
        nodes = [
            n.op for n in gpuir.lower(g, profile="ideal").nodes if not isinstance(n.op, k.View)
        ]
        kinds.append(Counter(op.name for op in nodes))
        assert {name for name, role in g.roles if role == "gradient"} == {
            f"{name}.grad" for name, _ in layer.named_parameters()
        }
    for kind in ("k.gemm", "k.attention", "k.attention_gradient"):
        assert kinds[0][kind] == kinds[1][kind], kind


def test_the_backward_pass_is_of_what_the_stack_recognizes():
    """Eager PyTorch keeps the scores of attention by hand, whoever derives its gradient."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.into = torch.nn.Linear(64, 192)

        def forward(self, x):
            shape = (*x.shape[:-1], 4, 16)
            q, k, v = (y.view(shape).transpose(1, 2) for y in self.into(x).chunk(3, -1))
            return (q @ k.transpose(-1, -2) / 4).softmax(-1) @ v

    def launched(**options: object) -> Counter[str]:
        x = torch.randn(2, 32, 64)
        g = gpuir.analyze(Attention(), (x,), target="a100", train=True, **options).graph
        assumed = [text for text in g.assumed if "gpuir derived the backward pass" in text]
        by_torch = options.get("autodiff") == "torch"
        assert len(assumed) == (0 if by_torch else 1)
        assert by_torch or f"the profile {options['profile']}" in assumed[0]
        return Counter(n.op.name for n in g.walk())

    theirs = launched(autodiff="torch", profile="eager")
    for how in ({"autodiff": "gpuir"}, {"autocast": "bf16"}, {"checkpoint": "into"}):
        ours = launched(profile="eager", **how)
        assert not {"k.attention", "k.attention_gradient"} & ours.keys(), how
        assert ours["k.gemm"] == theirs["k.gemm"], how
    for profile, how in (("ideal", {"autodiff": "gpuir"}), ("compiled", {"autocast": "bf16"})):
        found = launched(profile=profile, **how)
        assert found["k.attention"] == found["k.attention_gradient"] == 1, profile
    assert not launched(profile="compiled", autodiff="gpuir")["k.attention"], "f32 without TF32"


def test_a_saved_program_keeps_its_weights_on_disk(tmp_path: Path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.LayerNorm(32))
    program = torch.export.export(model, (torch.randn(4, 64),))
    torch.export.save(program, tmp_path / "model.pt2")
    (loaded, live) = (gpuir.load(source) for source in (tmp_path / "model.pt2", program))
    assert [str(v) for v in loaded.nodes] == [str(v) for v in live.nodes]
    assert [v.type for v in loaded.params] == [v.type for v in live.params]
    from gpuir.frontends.torch.archive import open_program

    weights = open_program(tmp_path / "model.pt2").state_dict.values()
    assert {type(w) for w in weights} == {torch._subclasses.FakeTensor}


def test_a_file_that_is_no_program_says_so(tmp_path: Path):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    bad = tmp_path / "bad.pt2"
    bad.write_bytes(b"not a zip")
    with pytest.raises(gpuir.GpuirError, match=r"torch\.export\.save"):
        gpuir.load(bad)
    with pytest.raises(gpuir.GpuirError, match="no such file"):
        gpuir.load(tmp_path / "none.pt2")


def test_a_size_that_a_program_has_not_is_refused():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    with pytest.raises(gpuir.GpuirError, match="no symbolic size has the name batch"):
        gpuir.load(model, args=(x,), dims={"batch": 8})
    rows = torch.export.Dim("rows")
    program = torch.export.export(model, (x,), dynamic_shapes=({0: rows},))
    (symbol,) = program.range_constraints
    for name in ("rows", "input.0", symbol.name):
        graph = gpuir.load(program, dims={name: 8})
        assert graph.outputs[0].type.shape == (8, 4)
    with pytest.raises(gpuir.GpuirError, match="the value of a symbolic size is missing") as caught:
        gpuir.load(program)
    assert "--dims rows=128" in str(caught.value)
    assert caught.value.found == "input: rowsx4"
    with pytest.raises(gpuir.GpuirError, match="two different values"):
        gpuir.load(program, dims={"rows": 8, "input.0": 9})
    with pytest.raises(gpuir.GpuirError, match=r"does not accept input\.1=5"):
        gpuir.load(program, dims={"rows": 8, "input.1": 5})
    with pytest.raises(gpuir.GpuirError, match="none of which is batch"):
        gpuir.load(program, dims={"batch": 8})


def test_the_sizes_of_a_saved_program_are_called_by_their_axes(tmp_path: Path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    rows, path = torch.export.Dim("rows"), tmp_path / "saved.pt2"
    shapes = ({0: 2 * rows}, {0: rows})
    args = (torch.randn(8, 4), torch.randn(4, 4))

    class Two(torch.nn.Module):
        def forward(self, x, y):
            return x.sum(0) + y

    torch.export.save(torch.export.export(Two(), args, dynamic_shapes=shapes), path)
    with pytest.raises(gpuir.GpuirError, match="the value of a symbolic size is missing") as caught:
        gpuir.load(path)
    assert caught.value.fix.startswith("--dims y.0=128   (for example), or --input x=256x4")
    assert caught.value.found.endswith(" is y.0")
    for dims in ({"y.0": 6}, {"x.0": 12}, {"x.0": 12, "y.0": 6, "x.1": 4}):
        assert gpuir.load(path, dims=dims).inputs[0].type.shape == (12, 4)
    for dims in ({"x.0": 5}, {"x.0": 12, "y.0": 5}, {"y.0": 6, "x.1": 5}):
        with pytest.raises(gpuir.GpuirError, match=r"does not accept|two different values"):
            gpuir.load(path, dims=dims)
    with pytest.raises(gpuir.GpuirError, match="no symbolic size has the name rows"):
        gpuir.load(path, dims={"y.0": 6, "rows": 6})


def test_a_size_beyond_what_was_exported_is_refused(tmp_path: Path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    model, args = torch.nn.Linear(4, 4), (torch.randn(8, 4),)
    rows = torch.export.Dim("rows", min=4, max=64)
    live = torch.export.export(model, args, dynamic_shapes=({0: rows},))
    torch.export.save(live, tmp_path / "saved.pt2")
    for source, name in ((live, "rows"), (tmp_path / "saved.pt2", "input.0")):
        assert gpuir.load(source, dims={name: 64}).inputs[0].type.shape == (64, 4)
        for size in (65, 3):
            with pytest.raises(gpuir.GpuirError, match=f"{name}={size} is outside") as caught:
                gpuir.load(source, dims={name: size})
            assert caught.value.expected == "4 to 64"
    with pytest.raises(gpuir.GpuirError, match=r"expected: +4 to 64"):
        gpuir.load(live, inputs={"input": (65, 4)})
    free = torch.export.export(model, args, dynamic_shapes=({0: torch.export.Dim.AUTO},))
    assert gpuir.load(free, dims={"input.0": 1}).inputs[0].type.shape == (1, 4)


def test_whole_shapes_bind_symbolic_sizes_in_training_too():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    rows = torch.export.Dim("rows")
    args = (torch.randn(2, 4),)
    program = torch.export.export(torch.nn.Linear(4, 4), args, dynamic_shapes=({0: rows},))
    assert gpuir.load(program, inputs={"input": (8, 4)}).outputs[0].type.shape == (8, 4)
    trained = gpuir.load(program, inputs={"input": (8, 4)}, train=True)
    assert trained.inputs[0].type.shape == (8, 4)  # and not that of the example
    for shape in ((8, 5), (8,)):
        with pytest.raises(gpuir.GpuirError, match=r"does not accept this shape|is missing"):
            gpuir.load(program, inputs={"input": shape})
    even, more = ({0: 2 * rows},), (torch.randn(8, 4),)
    twice = torch.export.export(torch.nn.Linear(4, 4), more, dynamic_shapes=even)
    assert gpuir.load(twice, inputs={"input": (6, 4)}).outputs[0].type.shape == (6, 4)
    with pytest.raises(gpuir.GpuirError, match="is missing"):
        gpuir.load(twice, inputs={"input": (5, 4)})
    with pytest.raises(gpuir.GpuirError, match="no input has the name 'x'"):
        gpuir.load(program, inputs={"x": (8, 4)})
    with pytest.raises(gpuir.GpuirError, match="runs on the arguments"):
        gpuir.load(torch.nn.Linear(4, 4), args=args, inputs={"input": (8, 4)})


@pytest.mark.filterwarnings("ignore:The tensor attributes")  # torch's, of exporting a GRU
@pytest.mark.parametrize("exported", [False, True])
def test_a_recurrent_layer_is_differentiated_whole_unless_torch_is_asked(exported: bool):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    module, args = torch.nn.GRU(4, 4), (torch.randn(3, 2, 4),)
    source = torch.export.export(module, args) if exported else module
    given = {} if exported else {"args": args}
    ours = gpuir.load(source, train=True, **given)
    assert any(isinstance(node.op, t.Loop) for node in ours.nodes)
    assert any(role == "gradient" for _, role in ours.roles)
    theirs = gpuir.load(source, train=True, autodiff="torch", **given)
    assert not any(isinstance(node.op, t.Loop) for node in theirs.nodes)


BUILT = """
import torch

class Heads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)

    def forward(self, x):
        return {"hidden": self.a(x), "logits": [self.b(x)]}

def exported(width=4):
    rows = torch.export.Dim("rows")
    shapes = ({0: rows},)
    return torch.export.export(Heads(), (torch.randn(2, width),), dynamic_shapes=shapes)

def module():
    return Heads(), (torch.randn(2, 4),)
"""


def test_a_function_may_give_an_exported_program(tmp_path: Path):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    (tmp_path / "heads.py").write_text(BUILT)
    path = f"{tmp_path}/heads.py:exported"
    with pytest.raises(gpuir.GpuirError, match="the value of a symbolic size is missing") as caught:
        gpuir.load(path, dims={"width": 4})
    symbol = (caught.value.fix or "").partition("--dims ")[2].partition("=")[0]
    graph = gpuir.load(path, dims={"width": 4, symbol: 8})
    assert graph.name == "heads.exported" and graph.inputs[0].type.shape == (8, 4)
    with pytest.raises(gpuir.GpuirError, match="has no parameter 'rows'"):
        gpuir.load(f"{tmp_path}/heads.py:module", dims={"rows": 8})


def test_a_file_may_import_what_lies_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside_it.py").write_text(BUILT)
    (tmp_path / "entry.py").write_text("from beside_it import module as build")
    assert gpuir.load(f"{tmp_path}/entry.py:build").name == "entry.build"


def test_outputs_of_a_class_have_the_names_of_its_fields(tmp_path: Path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    @dataclass
    class Sample:
        sample: torch.Tensor
        more: torch.Tensor | None = None

    class Output(dict[str, torch.Tensor]):
        """As diffusers has them: a class of its own, of which torch knows no paths."""

    class Pair(NamedTuple):
        a: torch.Tensor
        b: torch.Tensor

    class Gives(torch.nn.Module):
        def __init__(self, make: Callable[[torch.Tensor], Any]):
            super().__init__()
            self.linear, self.make = torch.nn.Linear(4, 4), make

        def forward(self, x: torch.Tensor) -> Any:
            return self.make(self.linear(x))

    torch.export.register_dataclass(Sample, serialized_type_name="test.Sample")
    torch.utils._pytree.register_pytree_node(
        Output,
        lambda d: ([*d.values()], [*d]),
        lambda values, keys: Output(zip(keys, values, strict=True)),
        serialized_type_name="test.Output",
    )
    makes = {
        "sample": Sample,
        "pair.a": lambda x: {"pair": Pair(x, x + 1)},
        "out": lambda x: Output(out=x),
        "deep.sample": lambda x: {"deep": Sample(x), "rest": [x + 1]},
    }
    for key, make in makes.items():
        graph = gpuir.load(Gives(make), args=(torch.randn(2, 4),), train=True, loss=key)
        assert any(role == "gradient" for _, role in graph.roles)
        joint = gpuir.load(Gives(make), args=(torch.randn(2, 4),), train=True)
        assert any(role == "gradient" for _, role in joint.roles)
        if key != "pair.a":  # torch saves no named tuple that is not registered
            program = torch.export.export(Gives(make), (torch.randn(2, 4),))
            torch.export.save(program, tmp_path / "saved.pt2")
            saved = gpuir.load(tmp_path / "saved.pt2", train=True, loss=key)
            assert any(role == "gradient" for _, role in saved.roles)


def test_a_program_is_called_as_its_class():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    args = (torch.randn(2, 4),)
    assert gpuir.load(torch.export.export(torch.nn.Linear(4, 4), args)).name == "Linear"


def test_a_loss_may_have_the_name_that_the_module_gives_it(tmp_path: Path):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    (tmp_path / "heads.py").write_text(BUILT)
    path = f"{tmp_path}/heads.py:module"
    graph = gpuir.load(path, train=True, loss="logits.0")
    gradients = {name for name, role in graph.roles if role == "gradient"}
    assert gradients == {"b.weight.grad", "b.bias.grad"}
    with pytest.raises(gpuir.GpuirError, match=r"no output has the name 'logit'") as caught:
        gpuir.load(path, train=True, loss="logit")
    assert "logits.0" in str(caught.value)


def test_a_module_left_in_training_mode_is_told_of():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    module, said = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout()), list[str]()
    args = (torch.randn(2, 4),)
    gpuir.load(module, args=args, warn=said.append)
    assert any(".eval()" in text for text in said)
    said.clear()
    gpuir.load(module, args=args, warn=said.append, train=True)
    gpuir.load(module.eval(), args=args, warn=said.append)
    gpuir.load(torch.nn.Linear(4, 4), args=args, warn=said.append)
    assert said == []


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("none.pt2", "none.pt2: no such file"),
        ("hf:none/config.json", "none/config.json: no such file"),
        ("hf:meta-llama/Llama-3.1-8B", "gpuir does not download models: save the config.json"),
        ("hf:empty", "empty/config.json: no such file"),
        ("none.py:build", "none.py: no such file"),
        ("none:build", "No module named 'none'"),
        ("broken.py:build", "division by zero"),
        ("there.pt2", "pip install 'gpuir[torch]'"),
        ("there.py:build", "pip install 'gpuir[torch]'"),
        ("hf:there", "pip install 'gpuir[hf]'"),
        ("there/config.json", "pip install 'gpuir[hf]'"),
        ("there", "pip install 'gpuir[hf]'"),
    ],
)
def test_without_torch_what_is_not_there_is_said_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, message: str
):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    for folder in ("there", "empty"):
        (tmp_path / folder).mkdir()
    for name in ("there.pt2", "there/config.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "there.py").write_text("import torch\ndef build(): ...\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(gpuir.GpuirError) as caught:
        gpuir.load(path)
    assert message in str(caught.value)
    assert ("PyTorch" in str(caught.value)) == message.startswith("pip")


def test_what_libraries_warn_of_does_not_stand_above_our_message(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "noisy.py").write_text(
        "import logging, warnings\n"
        "def warn(when):\n"
        "    logging.getLogger('some.library').warning('heard while %s', when)\n"
        "    warnings.warn(f'heard while {when}')\n"
        "warn('loading')\n"
        "def build():\n"
        "    warn('building')\n"
        "    raise ValueError('no')\n"
    )
    with pytest.raises(gpuir.GpuirError, match="ValueError: no"):
        gpuir.load(f"{tmp_path}/noisy.py:build")
    assert "heard" not in "".join(capfd.readouterr())
    assert logging.root.manager.disable == 0
