# ruff: noqa: E501  (headers of tables)
"""Every command that takes a table, on every kind of table: none ends in an internal error, and of
what is read each row is scored or counted with its reason."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from measured import OTHERS
from measured import TABLES as KERNELS

pytest.importorskip("torch")

from gpuir.cli.main import BUG, main
from gpuir.fit import collectives, learn
from gpuir.fit.readers import Unmodelled
from validation import (
    batches,
    deployments,
    dlrm,
    llm,
    mig_rows,
    models,
    runs,
    sharded,
    training,
    tuned,
)
from validation.precisions import Precision, precision_of
from validation.readers import read_table
from validation.throughput import cases

# Rows of GPUs that gpuir has and has not, in several precisions, with and without their numbers.
OWN: dict[str, str] = {
    "collectives": """system,library,mode,op,dtype,world_size,bytes,latency_us,gpus_per_node,rep_spread
h100_sxm,nccl,eager,all_reduce,fp16,8,1024,20,8,0.1
h100_sxm,nccl,eager,all_reduce,float,8,4096,21,8,
h100_sxm,nccl,eager,all_reduce,int8,16,4096,60,8,
h100_sxm,nccl,eager,all_reduce,sparkle,8,4096,21,8,
sparkle,nccl,eager,all_reduce,fp16,8,4096,21,8,
h100_sxm,nccl,eager,all_reduce,fp16,,,,8,
""",
    "images": """source,model,family,gpu,target,mode,precision,layout,software,batch,img_size,samples_per_s
results/a.csv,resnet18,resnet,T4,t4,eager,amp,nchw,torch 2.4.0,256,224,4000
results/a.csv,resnet18,resnet,T4,t4,train,amp bf16,channels_last,torch 2.4.0,256,224,4000
results/a.csv,resnet18,resnet,T4,t4,compile,int8,nchw,torch 2.4.0,256,224,4000
results/a.csv,resnet18,resnet,T4,sparkle,eager,fp16,nchw,torch 2.4.0,256,224,4000
results/a.csv,resnet18,resnet,T4,t4,eager,fp16,nchw,torch 2.4.0,,224,
""",
    "unet": """source,gpu,target,batch,mode,software,precision,it_per_s
x,A100,a100,4,eager,torch 2.0,f16,14
x,A100,a100,4,cudagraph,torch 2.0,amp,14
x,A100,a100,4,train,torch 2.0,f16,14
x,A100,a100,4,eager,torch 2.0,,14
""",
    "decoders": """model,gpu,target,dtype,batch,isl,osl,tokens_per_s,first_token_ms
llama-7b,A100,a100,f16,16,128,2048,592,
llama-7b,A100,a100,tf32,1,128,1,,16
llama-7b,A100,a100,amp,1,128,1,,16
llama-7b,A100,a100,fp8,1,128,1,,16
""",
    "labels": """device,model,mode,seqlen,batch,option,num_layer,e2e_ms,fw_ms,bwall_ms
Tesla_T4,small,inf,64,2,,2,10,10,
Tesla_T4,small,train,64,4,dp4,2,40,10,30
Tesla_T4,sparkle,inf,64,2,,2,10,10,
Sparkle,small,inf,64,2,fusion,,,,
""",
    "deployments": """id,framework,model,system,mode,gemm_dtype,moe_dtype,isl,osl,concurrency,ttft_ms,tpot_ms,tp_size,pp_size,attention_dp_size,moe_tp_size,moe_ep_size
0,vllm,meta-llama/Llama-3.1-8B-Instruct,h100_sxm,agg,fp8,,1024,128,8,90,9,1,1,1,1,1
1,vllm,meta-llama/Llama-3.1-8B-Instruct,h100_sxm,agg,sparkle,,1024,128,8,90,9,1,1,1,1,1
2,vllm,sparkle,h100_sxm,agg,,,1024,128,8,90,9,1,1,1,1,1
3,vllm,meta-llama/Llama-3.1-8B-Instruct,h100_sxm,disagg,,,,,,,,,,,,
""",
    "batches": """gpu,engine,model,workload,tp,pp,batch,output_len,prefill_ms,decode_ms,total_ms
A100-SXM4-80GB,vllm,small,two,1,1,2,10,8,0.4,12
A100-SXM4-80GB,sparkle,small,two,1,1,2,10,8,0.4,12
A100-SXM4-80GB,vllm,sparkle,two,1,1,2,10,8,0.4,12
A100-SXM4-80GB,vllm,small,sparkle,1,1,2,10,8,0.4,12
A100-SXM4-80GB,vllm,small,two,,,,,,,
""",
    "iterations": """gpu,model,batch,phase,measured_iter_ms,err_e2e_pct,err_gpu_active_pct,err_kernel_sum_only_pct,err_e2e_shared_overheads_pct
V100,DLRM_default,512,train,4.5,1,2,3,4
V100,sparkle,512,train,4.5,1,2,3,4
V100,DLRM_default,,infer,,,,,
""",
    "sharded": """id,model,gpu,gpus,gpus_per_node,dtype,placement,global_batch,step_time_s
0,dlrm-small,A100-SXM4-80GB,8,8,amp fp16,whole tables,4096,0.01
1,dlrm-small,A100-SXM4-80GB,8,8,sparkle,whole tables,4096,0.01
2,synthetic-sparkle,A100-SXM4-80GB,8,8,tf32,whole tables,4096,0.01
3,dcn-small,A100-SXM4-80GB,8,8,tf32,whole tables,,
""",
    "training": f"""{",".join(runs.COLUMNS)}
0,small,pretrain,A100-SXM4-80GB,ib,FSDP,bf16,{runs.LLM_FOUNDRY},0.1,none,,,64,8,8,8,1,1,1,1,1,64,8,,0.5
1,small,pretrain,A100-SXM4-80GB,ib,FSDP,nvfp4,{runs.LLM_FOUNDRY},0.1,none,,,64,8,8,8,1,1,1,1,1,64,8,,0.5
2,facts,pretrain,A100-SXM4-80GB,ib,FSDP,bf16,{runs.LLM_FOUNDRY},0.1,none,,,64,8,8,8,1,1,1,1,1,64,8,,0.5
3,sparkle,lora,A100-SXM4-80GB,ib,FSDP,bf16,{runs.LLM_FOUNDRY},0.1,none,,,,,,,,,,,,,,,
""",
    "other training": """id,model,gpu,gpus,dtype,batch_per_gpu,grad_accum,seq,step_time_s,items_per_s,version
0,bert-large,A100-SXM4-80GB,8,amp fp16,8,4,128,1.5,100,1
1,bert-large,A100-SXM4-80GB,8,amp bf16,8,4,128,1.5,100,1
2,bert-large,A100-SXM4-80GB,8,int8,8,4,128,1.5,100,1
3,resnet50,A100-SXM4-80GB,8,tf32,8,4,,1.5,100,1
4,bert-large,A100-SXM4-80GB,,tf32,,,128,,,1
""",
    "mig": """id,series,gpu,gpu_sku,mode,profile,instances_active_per_gpu,co_runners,scope,workload,model,phase,framework,precision,metric,unit,relative_to,quality,n_gpus,batch,seq_len,value,ratio
0,lab,H100-80GB,H100-SXM5-80GB,mig,1g.10gb,1,none,per instance,,ResNet-50,infer,PyTorch,int4 weights fp16,latency,ms,,ok,1,8,,9,
1,lab,Sparkle,Sparkle,mig,1g.10gb,1,none,per instance,,ResNet-50,infer,PyTorch,FP16,latency,ms,,ok,1,8,,9,
2,lab,H100-80GB,H100-SXM5-80GB,mig,1g.10gb,1,none,per instance,,ResNet-50,infer,PyTorch,FP16,latency,ms,,ok,1,,,,
""",
    "sweep": """kernel,gpu,block_size_x,block_size_y,tile_size_x,tile_size_y,read_only,use_padding,use_shmem,staged,status,median_ms
convolution_a,RTX-A4000,32,4,1,2,0,0,0,0,ok,1.5
convolution_a,RTX-A4000,64,4,1,2,0,0,0,0,ok,1.2
convolution_a,RTX-A4000,64,4,1,2,0,0,0,0,ok,
convolution_a,A100-PCIE-40GB,64,4,1,2,0,0,0,0,compile_failed,
convolution_a,Sparkle,64,4,1,2,0,0,0,0,ok,1.2
""",
    "winners": """kernel,gpu,dtype,m,n,k,experts,topk,block_n,BLOCK_SIZE_M,BLOCK_SIZE_N,BLOCK_SIZE_K,GROUP_SIZE_M,num_warps,num_stages,space,in_space
w8a8_block_gemm,H100-SXM5-80GB,fp8_w8a8,64,512,512,,,128,16,32,64,1,4,2,mine,True
w8a8_block_gemm,H100-SXM5-80GB,fp8_w8a8,64,512,512,,,128,999,32,64,1,4,2,mine,True
w8a8_block_gemm,H100-SXM5-80GB,sparkle,64,512,512,,,128,16,32,64,1,4,2,mine,False
""",
    "instances": """kernel,gpu,m,n,k,dtype,latency_us,libtype,kernel_id,split_k
a8w8,MI300X,64,512,512,int8,9,ck,0,0
a8w8,MI300X,64,512,512,bf16,9,ck,0,0
a8w8,MI300X,64,512,512,int8,9,asm,0,0
a8w8,MI300X,64,512,512,int8,9,ck,999,0
""",
    "pairs": "kernel,gpu,stage1_kernel,stage2_kernel\nfused_moe_2stage,MI300X,a,b\n",
    "mixed steps": """gpu,framework,version,model,tp,dtype,q_heads,kv_heads,head_dim,op,tokens,experts_hit,chunk,n_decode,kv,latency_us
h100_sxm,vllm,0.9,small,1,bf16,8,8,64,layer,64,,32,32,512,90
""",
}
# Tables that no command reads.
STRANGE = {
    "points": "id,gpu,model,phase,dtype,shape,metric,measured,measured_s\n0,t4,bert,inference,amp bf16,b1 s16,ms,5,0.005\n",
    "programs": "level,problem,name,program,dtype,outputs,params\n1,2,gemm,a.py,float16,1,0\n",
    "timings": "id,level,name,gpu,mode,dtype,tf32,mean_ms\n0,1,gemm,t4,eager,float32,True,5\n",
    "boards": "source,gpu,op,dtype_in,dtype_acc,m,n,k,value,unit,time_s\nx,t4,gemm,mxfp6,fp32,1,2,3,4,TFLOPS,5\n",
    "clocks": "kind,gpu,dtype,power_limit_w,power_w,clock_mhz\nrun,t4,w4a16,70,60,1000\n",
    "host times": "kind,what,metric,framework,model,dtype,mode,time_s\nop,aten::add,self,pytorch,small,bf16,eager,1e-6\n",
    "links": "gpu,ranks,collective,dtype,bytes,time_s\nt4,8,all_reduce,double,1024,1e-4\n",
    "memory": "kind,model,gpu,precision,peak_memory_bytes,oom\nstep,small,t4,bf16 mixed,1e9,False\n",
    "sharing": "gpu,mode,mig_slice,n_tenants,model,dtype,metric,value\nt4,mps,,2,small,fp16,latency,9\n",
    "loads": "id,engine,model,gpu,weight_dtype,concurrency,ttft_mean_ms,tpot_mean_ms\n0,vllm,small,t4,uint4,8,90,9\n",
    "requests": "arrival_ms,input_len,output_len\n0,100,10\n5,200,20\n",
    "gpus": "sku,name,vendor,sm_count\nt4,T4,nvidia,40\n",
    "empty": "",
}
KINDS = {**OTHERS, **KERNELS, **OWN, **STRANGE}

SMALL = {
    **dict.fromkeys(("layers", "heads", "kv_heads"), 2),
    "hidden": 64,
    "head_dim": 32,
    "ffn": 128,
    "vocab": 256,
    "kind": "dense decoder",
    "gated": False,
    "activation": "gelu",
    "norm": "layernorm",
    "position": "learned",
    "tied_embedding": True,
    "bias": True,
}
FACTS = {"small": SMALL, "facts": {"kind": "dense decoder", "facts": "none are printed"}}
CONFIGS = {
    "small": {"model_type": "gpt2", "n_embd": 64, "n_head": 2, "n_layer": 2, "vocab_size": 9}
}
TABLE_OF = {
    "rows": 1000,
    "width": 16,
    "count": 8,
    "features_per_table": 1,
    "lookups_per_feature": [1],
}
EMBEDDINGS = {
    "small": {"tables": [TABLE_OF], "numerical_features": 8, "bottom_mlp": [16], "top_mlp": [1]}
}
DECODER = {
    "architecture": "LlamaForCausalLM",
    "layers": 2,
    "hidden": 64,
    "heads": 2,
    "kv_heads": 2,
    "head_dim": 32,
    "intermediate": 128,
    "vocab": 256,
    "activation": "silu",
    "tied_embeddings": False,
    "dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What lies beside tables: facts of models, prompts, spaces of tuners."""
    found = tmp_path_factory.mktemp("tables")
    (found / "workloads").mkdir()
    beside: dict[str, Any] = {"models.json": FACTS, "configs.json": CONFIGS}
    beside |= {"embedding_models.json": EMBEDDINGS, "workloads/models.json": {"small": DECODER}}
    names = (*tuned.NAMES, "SPLIT_K")
    beside["space_triton.json"] = {"mine": {n: [1, 2, 4, 16, 32, 64] for n in names[:1]}}
    beside["space_triton.json"]["mine"] |= {
        "BLOCK_SIZE_M": [16, 32], "BLOCK_SIZE_N": [32], "BLOCK_SIZE_K": [64],
        "GROUP_SIZE_M": [1], "num_warps": [4], "num_stages": [2],
    }  # fmt: skip
    for name, content in beside.items():
        (found / name).write_text(json.dumps(content))
    (found / "workloads/two.csv").write_text("request,input_len\n0,10\n1,30\n")
    (found / "space_aiter_ck.csv").write_text(
        "kernel,kernel_id,tile_m,tile_n,tile_k,threads\na8w8,0,64,64,64,256\na8w8,1,128,64,64,256\n"
    )
    return found


# ---------------------------------------------------------------------------- rows are counted

Counted = Callable[[Path], int]


def _kernels(path: Path) -> int:
    table = read_table(path)
    return sum(map(len, table.batches)) + sum(table.skipped.values())


def _collectives(path: Path) -> int:
    table = collectives.read(path)
    return sum(len(s.nbytes) for s in table.series) + sum(table.skipped.values())


def _throughputs(path: Path) -> int:
    table = cases.read(path)
    return len(table.cases) + sum(table.skipped.values())


def _labels(path: Path) -> int:
    table = models.read_labels(str(path), CONFIGS)
    return len(table.cases) + sum(table.skipped.values())


def _layers(path: Path) -> int:
    table = llm.read(path)
    scored = sum(int((s > 0).sum()) for m in table.models for s in m.parts.values())
    return scored + sum(table.skipped.values())


def _deployments(path: Path) -> int:
    table = deployments.read(path)
    return len(table.runs) + sum(table.skipped.values())


def _batches(path: Path) -> int:
    table = batches.read(path)
    return len(table.cases) + sum(table.skipped.values())


def _iterations(path: Path) -> int:
    found, skipped = dlrm.read(path)
    return len(found) + sum(skipped.values())


def _sharded(path: Path) -> int:
    found, skipped = sharded.read(path, EMBEDDINGS)
    return len(found) + sum(skipped.values())


def _training(path: Path) -> int:
    models_file = "configs.json" if runs.are_labels(path) else "models.json"
    found, skipped = training.read(str(path), str(path.with_name(models_file)))
    return len(found) + sum(skipped.values())


def _tuned(path: Path) -> int:
    found, skipped = tuned.read([str(path)])
    rows = sum(p.count if p.time_s is not None else len(p.winners) for p in found)
    return rows + sum(s.rows for s in skipped)


def _mig(path: Path) -> int:
    return len(mig_rows.read(path))


READ: Mapping[str, tuple[Counted, ...]] = {
    "collectives": (_kernels, _collectives),
    "images": (_kernels, _throughputs),
    "unet": (_throughputs,),
    "decoders": (_throughputs,),
    "labels": (_labels, _training),
    "mlp_ops": (_layers,),
    "deployments": (_deployments,),
    "batches": (_batches,),
    "iterations": (_iterations,),
    "sharded": (_sharded,),
    "training": (_training,),
    "other training": (_training,),
    "mig": (_mig,),
    "sweep": (_tuned,),
    "winners": (_tuned,),
    "instances": (_tuned,),
    "pairs": (_tuned,),
    **dict.fromkeys((n for n in KERNELS if n != "mlp_ops"), (_kernels,)),
}
ODD = ("", "nan", "-1", "0", "3.5", "1e400", "9" * 30, "sparkle", "amp bf16", "fp8")


@pytest.mark.parametrize("kind", READ)
def test_whatever_a_cell_holds_each_row_is_read_or_counted(folder: Path, kind: str):
    head, *lines = csv.reader(io.StringIO(KINDS[kind]))
    path = folder / "odd.csv"
    for text in (lines, [], lines[:1], *_odd(lines)):
        out = io.StringIO()
        csv.writer(out).writerows([head, *text])
        path.write_text(out.getvalue())
        for counted in READ[kind]:
            assert counted(path) == len(text), (counted, text)


def _odd(lines: list[list[str]]) -> list[list[list[str]]]:
    """The lines with each cell of every other one replaced."""
    return [
        [[*line[:i], odd, *line[i + 1 :]] if n % 2 == 0 else line for n, line in enumerate(lines)]
        for i in range(len(lines[0]))
        for odd in ODD
    ]


@pytest.mark.parametrize("kind", [k for k in READ if k not in ("pairs", "winners", "instances")])
def test_a_table_says_the_same_as_parquet(folder: Path, kind: str):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow.csv").read_csv(io.BytesIO(KINDS[kind].encode()))
    path = folder / "packed.parquet"
    parquet.write_table(table, path)
    for counted in READ[kind]:
        assert counted(path) == table.num_rows, counted


# ---------------------------------------------------------------------------- precisions


@pytest.mark.parametrize(
    ("said", "is_read"),
    [
        ("f32", Precision("f32", tf32=False)),
        ("TF32", Precision("f32", tf32=True)),
        ("fp16", Precision("f16")),
        ("bf16", Precision("bf16")),
        ("amp", Precision("f32", "f16")),
        ("amp fp16", Precision("f32", "f16")),
        ("amp bf16", Precision("f32", "bf16")),
        ("amp_bf16", Precision("f32", "bf16")),
        ("bf16 autocast", Precision("f32", "bf16")),
        *((s, None) for s in ("", "int8", "fp8", "mixed", "amp int8", "amp tf32", "bf16 fp8")),
    ],
)
def test_a_precision_is_read_as_what_it_is_or_refused(said: str, is_read: Precision | None):
    if is_read is not None:
        assert precision_of(said) == is_read
        return
    with pytest.raises(Unmodelled, match=f"precision {said or 'not stated'} is not modelled"):
        precision_of(said)


def test_bits_of_a_collective_are_those_of_its_dtype():
    assert {d: collectives.BITS[d] for d in ("int8", "half", "float", "double")} == {
        "int8": 8,
        "half": 16,
        "float": 32,
        "double": 64,
    }


@pytest.mark.parametrize("said", ["int4", "int4 weights, fp16", "W4A16", "nvfp4", "fp64"])
def test_a_slice_that_ran_in_four_bits_is_not_read_as_half(said: str):
    fields = dict.fromkeys(mig_rows.COLUMNS, "") | {"framework": "TensorRT", "precision": said}
    numbers = dict.fromkeys(mig_rows.NUMBERS, 0)
    with pytest.raises(mig_rows.NotScored, match=f"precision {said}: not known here"):
        mig_rows.numbers_of(mig_rows.Row(**{**fields, **numbers}))


# ---------------------------------------------------------------------------- commands

TABLES_OF = ("--configs", "configs.json")
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "eval kernels": ("eval", "kernels", "TABLE", "--json", "-"),
    "eval kernels --calibrate": ("eval", "kernels", "TABLE", "--calibrate", "2"),
    "eval models": ("eval", "models", "TABLE", *TABLES_OF, "--json", "-"),
    "eval models, no configs": ("eval", "models", "TABLE", "--json", "-"),
    "eval dlrm": ("eval", "dlrm", "TABLE", "--json", "-"),
    "eval collectives": ("eval", "collectives", "TABLE", "--json", "-"),
    "eval collectives --fit": ("eval", "collectives", "TABLE", "--fit", "weights.json"),
    "eval training": ("eval", "training", "TABLE", "--json", "-"),
    "eval training --models": ("eval", "training", "TABLE", "--models", "configs.json"),
    "eval mig": ("eval", "mig", "TABLE", "--json", "-"),
    "eval tuning": ("eval", "tuning", "TABLE"),
    "calibrate": ("calibrate", "--target", "h100-sxm", "--table", "TABLE"),
    "fit": ("fit", "TABLE", "--quick", "-o", "fitted.json"),
    "shard": ("shard", "TABLE", "--cluster", "dgx-a100", "--seconds", "0"),
    "collect": ("collect", "--target", "cpu", "--dry-run", "-o", "TABLE"),
    "collect --plan": (
        "collect",
        "--target",
        "cpu",
        "--dry-run",
        "-o",
        "new.csv",
        "--plan",
        "TABLE",
    ),
    "eval models --store": ("eval", "models", "none.csv", "--store", "TABLE"),
    "fit --without": ("fit", "TABLE", "--quick", "--without", "h100-sxm", "-o", "fitted.json"),
}
# Of whole models each row takes seconds: their own tests run them, here no row has a known GPU.
LONG = ("eval models", "eval models, no configs", "eval dlrm", "eval training", "eval mig")


FITTED = ("fit", "calibrate", "eval kernels --calibrate")  # a second a table: some of them
FEW = ("eager_gemm", "conv", "gemm", "decode", "moe", "mhc", "llmcompass")


@pytest.mark.parametrize("command", COMMANDS)
def test_no_table_ends_a_command_in_an_internal_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, command: str
):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(learn, "STEPS", 2)  # of a fit: what it finds is tested elsewhere
    (folder / "none.csv").write_text(OWN["images"].splitlines(keepends=True)[0])
    for kind, text in KINDS.items():
        if command.startswith(FITTED) and kind in KERNELS and kind not in FEW:
            continue
        unknown = _of_no_gpu(text) if command.startswith(LONG) else text
        head = "".join(text.splitlines(keepends=True)[:1])
        for part in (unknown, head) if kind in READ else (unknown,):
            (folder / "table.csv").write_text(part)
            args = [("table.csv" if word == "TABLE" else word) for word in COMMANDS[command]]
            result = CliRunner().invoke(main, args)
            assert result.exit_code in (0, 1, 2), (kind, args, result.stderr)
            assert result.exit_code != BUG and "internal error" not in result.stderr
            if result.exit_code == 0 and "--json" in args:
                _check_counts(kind, result, len(part.splitlines()) - 1)
            for name in ("fitted.json", "fitted.md", "weights.json", "new.csv"):
                (folder / name).unlink(missing_ok=True)


def _of_no_gpu(text: str) -> str:
    head, *lines = [*csv.reader(io.StringIO(text))] or [[]]
    out = io.StringIO()
    at = [
        i for i, name in enumerate(head) if name in ("gpu", "gpu_sku", "target", "device", "system")
    ]
    rows = [["sparkle" if i in at else cell for i, cell in enumerate(row)] for row in lines]
    csv.writer(out).writerows([head, *rows])
    return out.getvalue()


def _check_counts(kind: str, result: Result, rows: int) -> None:
    said = json.loads(result.stdout)
    (file,) = said.get("files") or [{"scored": len(said["cases"]), "skipped": said["skipped"]}]
    assert file.get("rows", rows) == rows, (kind, file)
    scored = file.get("lines", file.get("scored", 0))
    assert scored + sum(file["skipped"].values()) == rows, (kind, file)
