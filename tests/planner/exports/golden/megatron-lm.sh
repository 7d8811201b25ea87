# mixed on 16 devices of h100-8x8, as `tangram plan` found it, for Megatron-LM:
# take it in with `source` and start torchrun ... pretrain_gpt.py "${MODEL_ARGS[@]}" "${PLAN_ARGS[@]}".
export CUDA_DEVICE_MAX_CONNECTIONS=1
PLAN_ARGS=(
  --tensor-model-parallel-size 2
  --sequence-parallel
  --tp-comm-overlap
  --context-parallel-size 2
  --pipeline-model-parallel-size 2
  --num-virtual-stages-per-pipeline-rank 2
  --expert-model-parallel-size 4
  --expert-tensor-parallel-size 1
  --moe-grouped-gemm
  --moe-token-dispatcher-type alltoall
  --use-distributed-optimizer
  --overlap-grad-reduce
  --overlap-param-gather
  --num-distributed-optimizer-instances 2
  --micro-batch-size 1
  --global-batch-size 32
  --seq-length 4096
  --bf16
  --fp8-format hybrid
  --fp8-recipe tensorwise
  --recompute-granularity selective
  --recompute-modules layernorm moe_act
)
