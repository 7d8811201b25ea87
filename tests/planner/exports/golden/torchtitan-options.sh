# mixed on 16 devices of h100-8x8, as `tangram plan` found it, for torchtitan 0.3:
# take it in with `source` and start: torchrun ... -m torchtitan.train --module M --config C "${PLAN_ARGS[@]}".
PLAN_ARGS=(
  --training.local_batch_size 8
  --training.global_batch_size 32
  --training.seq_len 4096
  --training.mixed_precision_param bfloat16
  --parallelism.data_parallel_replicate_degree 1
  --parallelism.data_parallel_shard_degree 4
  --parallelism.fsdp_reshard_after_forward never
  --parallelism.tensor_parallel_degree 2
  --parallelism.context_parallel_degree 1
  --parallelism.pipeline_parallel_degree 2
  --parallelism.pipeline_parallel_schedule DualPipeV
  --parallelism.pipeline_parallel_microbatch_size 1
  --parallelism.pipeline_parallel_first_stage_less_layers 0
  --parallelism.pipeline_parallel_last_stage_less_layers 0
  --parallelism.expert_parallel_degree 4
  --parallelism.enable_sequence_parallel
  --training.disable_cuda_graphs
  --compile.no_enable
  activation-checkpoint:full
)
