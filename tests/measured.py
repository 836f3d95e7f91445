# ruff: noqa: E501  (headers of tables)
"""A few rows of every kind of measurement table, as text."""

from __future__ import annotations

TABLES: dict[str, str] = {
    "eager_gemm": """split,device,op,b,m,n,k,latency_us,kernel_name
train,Tesla_T4,bmm,4,512,64,256,120.5,volta_sgemm_64x64_nn
train,Tesla_T4,linear,1,2048,1024,4096,2500,volta_sgemm_128x64_tn
train,Tesla_T4,linear,1,1,16,16,55,volta_sgemm_32x32_tn
test_indist,NVIDIA_A100-PCIE-40GB,linear,1,2048,1024,4096,1100,ampere_sgemm_128x128_tn
train,Sparkle_9000,linear,1,2048,1024,4096,1100,sparkle
""",
    "conv": """split,device,op,b,in_channels,out_channels,kernel_size,input_size,stride,padding,latency_us
train,Tesla_T4,conv,8,64,128,3,28,1,1,400
train,Tesla_P4,conv,8,64,128,3,28,1,1,700
""",
    "elementwise": """split,device,op,b,h,latency_us
train,AMD_Instinct_MI100,add,8192,4096,420
train,AMD_Instinct_MI100,powu,8192,4096,290
train,AMD_Instinct_MI100,sparkle,8192,4096,290
""",
    "softmax": """split,device,op,b,h,latency_us
train,Tesla_V100-PCIE-32GB,softmax,16384,4096,650
train,Tesla_V100-PCIE-32GB,layernorm,16384,4096,700
""",
    "model_ops": """device,model,mode,seqlen,batch,idx,in_layer,name,kind,target,module,input_shapes,\
contiguous_in,args,kwargs,output_shape,dtype,fw_us,bw_us,acc_us
Tesla_T4,bert,inf,512,8,1,True,q,call_module,a.q,Linear,"[[8,512,1024]]",1,x,,"[8,512,1024]",f,2500,0,0
Tesla_T4,bert,inf,512,8,2,True,v,call_method,view,Self,"[[8,512,1024],[1]]",11,x,,"[8,512,16,64]",f,9,0,0
Tesla_T4,bert,inf,512,8,3,True,m,call_function,matmul,Self,"[[8,16,512,64],[8,16,64,512]]",00,x,,\
"[8,16,512,512]",f,900,0,0
Tesla_T4,bert,inf,512,8,4,True,a,call_function,add,Self,"[[8,16,512,512],[8,1,1,512]]",11,x,,\
"[8,16,512,512]",f,1200,0,0
NVIDIA_A100-PCIE-40GB,bert_large,inf,512,8,1,True,q,call_module,a.q,Linear,"[[8,512,1024]]",1,x,,\
"[8,512,1024]",f,900,0,0
""",
    "gemm": """system,framework,version,dtype,kernel_source,m,n,k,latency_us,flag
h100_sxm,vllm,0.24.0,bf16,linear,4096,4096,4096,220,
h100_sxm,sglang,0.5.14,bf16,linear,4096,4096,4096,230,
h100_sxm,vllm,0.24.0,fp8,linear,4096,4096,4096,150,
h100_sxm,trtllm,1.0.0,fp8,linear,4096,4096,4096,160,
h100_sxm,vllm,0.24.0,bf16,linear,64,4096,4096,900,spike
b200_sxm,vllm,0.24.0,nvfp4,linear,4096,4096,4096,60,
b200_sxm,vllm,0.24.0,sparkle,linear,4096,4096,4096,60,
""",
    "prefill": """system,framework,version,kernel_source,attn_dtype,kv_dtype,compute_dtype,batch,isl,\
q_heads,kv_heads,head_dim,window,latency_us,flag
h200_sxm,vllm,0.24.0,fa3,bf16,bf16,bf16,4,4096,32,8,128,0,900,
h200_sxm,vllm,0.24.0,fa3,bf16,fp8,ambiguous,4,4096,32,8,128,128,500,
h200_sxm,mine,1,fa3,fp8,fp8,fp8,4,4096,32,8,128,0,600,
""",
    "decode": """system,framework,version,kernel_source,attn_dtype,kv_dtype,compute_dtype,batch,\
past_kv,q_heads,kv_heads,head_dim,window,latency_us,flag
h200_sxm,vllm,0.24.0,fa3,bf16,bf16,bf16,64,4095,32,8,128,0,300,
h200_sxm,vllm,0.24.0,fa3,bf16,bf16,bf16,64,4095,32,8,128,0,30,impossible
""",
    "encoder": """system,framework,version,kernel_source,attn_dtype,batch,seq_len,heads,head_dim,latency_us
b200_sxm,vllm,0.24.0,fa4,bf16,4,1024,16,64,60
""",
    "mla": """system,framework,version,kernel_source,attn_dtype,kv_dtype,phase,heads,batch,isl,past_kv,tp,latency_us
h100_sxm,vllm,0.14.0,mla,bf16,bf16,decode,128,32,1,4095,1,250
h100_sxm,vllm,0.14.0,mla,bf16,bf16,prefill,128,2,1024,0,1,700
""",
    "mla_bmm": """system,framework,version,kernel_source,op,dtype,tokens,heads,latency_us
h100_sxm,vllm,0.14.0,bmm,mla_gen_pre,bf16,128,128,25
h100_sxm,vllm,0.14.0,bmm,mla_gen_post,fp8,128,128,25
""",
    "moe": """system,framework,version,kernel_source,dtype,distribution,tokens,hidden,inter,topk,experts,\
tp,ep,latency_us,flag
h100_sxm,vllm,0.24.0,vllm_fused_moe,bf16,balanced,1024,4096,14336,2,8,1,1,2600,
h100_sxm,trtllm,1.0,moe_torch_flow_nongated,fp8,power_law_1.2,1024,4096,14336,2,8,2,2,900,
""",
    "quantize": """system,framework,version,kernel_source,op,dtype,m,k,latency_us
h100_sxm,vllm,0.24.0,x,static_quantize,fp8,4096,8192,50
h100_sxm,vllm,0.24.0,x,dynamic_scale_overhead,fp8,4096,8192,20
""",
    "linear_attention": """system,framework,version,family,kernel_source,phase,batch_size,seq_len,\
num_tokens,d_model,d_conv,num_k_heads,head_k_dim,num_v_heads,head_v_dim,d_state,nheads,head_dim,\
n_groups,chunk_size,latency_us
h100_sxm,sglang,0.5.14,gdn,causal_conv1d_fn,context,4,1024,4096,2048,4,16,128,32,128,0,0,0,0,0,60
h100_sxm,sglang,0.5.14,gdn,chunk_gated_delta_rule,context,4,1024,4096,2048,4,16,128,32,128,0,0,0,0,64,300
h100_sxm,trtllm,1.3.0,mamba2,mamba_chunk_scan_combined,context,4,1024,4096,4096,4,0,0,0,0,128,64,64,8,256,300
""",
    "mhc": """system,framework,version,op,kernel_source,tokens,hidden,hc_mult,num_sites,sinkhorn_iters,latency_us
h100_sxm,sglang,0.5.14,pre,mhc,4096,4096,4,1,20,120
h100_sxm,sglang,0.5.14,post,mhc,4096,4096,4,1,20,90
""",
    "mlp_ops": """gpu,model,op,dtype,tokens,tp,hidden,ffn,q_heads,kv_heads,vocab,gated,gemm_m,gemm_n,\
gemm_k,latency_us,latency_std_us
a40,llama,mlp_up_proj,fp16,1024,1,4096,11008,32,32,32000,True,1024,22016,4096,1500,3
a40,llama,add,fp16,1024,1,4096,11008,32,32,32000,True,0,0,0,45,3
a40,llama,emb,fp16,1024,1,4096,11008,32,32,32000,True,0,0,0,35,3
a40,llama,attn_rope,fp16,1024,1,4096,11008,32,32,32000,True,0,0,0,35,3
a40,llama,mlp_act,fp16,1024,1,4096,11008,32,32,32000,True,0,0,0,120,3
a40,llama,input_layernorm,fp16,1024,1,4096,11008,32,32,32000,True,0,0,0,45,3
""",
    "llmcompass": """gpu,op,dtype,m,n,k,latency_us
A100,matmul,fp16,4096,12288,12288,4600
A100,softmax,fp16,8192,4096,0,146
A100,layernorm,fp16,32768,4096,0,348
A100,gelu,fp16,536870912,1,0,1375
4xA100,gpt3_layer_tp4_prefill_Wo_proj,fp16,16384,0,0,4540
""",
}

OTHERS: dict[str, str] = {
    "collectives": """system,library,mode,op,dtype,world_size,bytes,latency_us
h100_sxm,nccl,eager,all_reduce,fp16,8,1024,20
""",
    "moe_alltoall": """system,library,op,dtype,nodes,ep,tokens_per_rank,latency_us
h100_sxm,deepep,combine,,1,8,128,60
""",
    "e2e_serving": "id,framework,model,system,ttft_ms,tpot_ms\nx,vllm,llama,h100_sxm,100,10\n",
    "model_labels": "device,model,mode,option,e2e_ms\nTesla_T4,bert,inf,none,100\n",
    "dlrm": "gpu,model,batch,phase,measured_iter_ms\nV100,DLRM,512,train,4.5\n",
    "host": "kind,op,model,batch,mean_us,std_us,count,machine\nt1,,DLRM,512,7,6,11,V100\n",
    "locality": "dataset,year,tables,batch,indices,unique_rows\nx,2021,8,64,100,10\n",
    "systems": "system,sm_version,mem_bw_gbps\nh100_sxm,90,3350\n",
    "devices": "device,device_string,num_sm\nTesla_T4,Tesla T4,40\n",
    "versions": "table,system,reference_version,compared_version\ngemm,h100_sxm,1,2\n",
}
