#!/bin/bash
#SBATCH --gres=gpu:8
export MODEL="org/Base-7B"
NAME='first'
NAME+=_run
RATE=2e-5 # as in the paper
LIST="assistant_only_loss"
ARGS=(
  --per_device_train_batch_size 2   # rows
  --gradient_accumulation_steps 4
)
ARGS+=(--bf16)
# trl sft --model_name_or_path of/a-comment
echo start && NCCL_DEBUG=INFO accelerate launch --config_file zero3.yaml --num_processes 6 --mixed_precision=bf16 \
  trl/scripts/sft.py --model_name_or_path "$MODEL" --dataset-name org/chats --learning_rate=${RATE} \
  --eval_strategy no --project $(date +%s) --report_to wandb tensorboard --no_completion_only_loss \
  --output_dir "${OUT_NEVER_SET:-outputs/x}" "${ARGS[@]}" --packing --run_name "$NAME one
two" --lr_scheduler_type ${KIND_NEVER_SET-linear} --lr_scheduler_kwargs '{"a": 1}' --seed $SEED_NEVER_SET \
  --adam_beta1 .85 --max_grad_norm=-1 --neftune_noise_alpha 5 --logging_steps none --save_steps 20 --no_cuda \
  --chat_template '$MODEL {{ x }}' --warmup_steps 12 > log.txt 2>&1 | tee -a log.txt
trl dpo --model_name_or_path outputs/x --dataset_name org/pairs; trl grpo --model_name_or_path outputs/x
(torchrun train.py --model_name_or_path a/b --lr 3 &)
python eval.py --model outputs/x
