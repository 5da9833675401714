#!/usr/bin/env bash
# Train a real model in one config, several seeds side by side on one GPU, and keep the figures.
#
#     bash bench/real_model.sh CONFIG OUT "0 1 2" [key=value ...]
#
# First the untrained model is evaluated, with and without demonstration games; then each seed is
# trained. Called again, it goes on: what is finished is not done again, and runs resume. OUT gets
# the tables, the games and the metrics, without weights. MODEL names the untrained model; LIMIT_S
# (540) ends the training in time.
set -u
config=$1 out=$2 seeds=$3
shift 3
name=$(basename "$config" .yaml)
model=${MODEL:-models/SmolLM2-135M-Instruct.Q4_1.gguf}
limit=${LIMIT_S:-540}
began=$SECONDS
mkdir -p "$out" runs
if [ ! -f "runs/${name}_untrained/done" ]; then
    for shown in 0 1 2; do
        python3 eval.py --checkpoint "$model" --config "$config" --games generated --num 256 \
            --temperature 1 --temperature 0 --out "runs/${name}_untrained/demonstrations_$shown" \
            "game.demonstrations=$shown" engine.mem_fraction=0.25 "$@" \
            > "$out/untrained_$shown.log" 2>&1 &
    done
    wait
    mkdir -p "runs/${name}_untrained" && touch "runs/${name}_untrained/done"
fi
left=$((limit - SECONDS + began))
for seed in $seeds; do
    timeout -s INT "$left" python3 train.py --config "$config" "out=runs/${name}_$seed" \
        "seed=$seed" "$@" > "$out/train_$seed.log" 2>&1 &
done
wait
for folder in runs/"${name}"_*; do
    kept="$out/$(basename "$folder")"
    mkdir -p "$kept"
    find "$folder" -maxdepth 2 \( -name '*.json' -o -name '*.jsonl' -o -name '*.md' -o -name config.yaml \) \
        -size -8M -not -path '*/checkpoints/*' -not -path '*/final/*' -not -path '*/warm_start/*' \
        -exec cp --parents {} "$kept" \;
done
for log in "$out"/*.log; do echo "== $log"; tail -n 12 "$log"; done
