#!/usr/bin/env bash
# Make the figures under docs/results again, short runs first, then the tables and pages that are written from them.
#     docs/results/remake.sh               files that are not done yet; after a kill, the current file starts again
#     docs/results/remake.sh benchmarks    also benchmarks/results (on a quiet machine; peers and tpu_compile need extras)
# Run it from a clean, committed checkout, because each file names its commit. A file is done when it holds fingerprints and a
# command, made by code without changes. The numbers are core-minutes on two cores, about 600 in all.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONPATH=$PWD PATH="$PWD/.venv/bin:$PATH"
mkdir -p docs/results/smollm2/butler-variants
failed=0
one() {  # file, core-minutes, command
  if python - "$1" <<'P'
import json, sys
try:
    data = json.load(open(sys.argv[1]))
except OSError:
    raise SystemExit(1)
done = "fingerprints" in data and data.get("command") and data.get("complete", True)
raise SystemExit(0 if done and not str(data.get("commit")).endswith("changes") else 1)
P
  then echo "done already: $1"; return; fi
  echo "== $1 (about $2 core-minutes)"; date
  bash -c "$3" || { echo "FAILED: $3"; failed=1; }
}
# window.json, calibrated.json, eight-bits.json and needle-before.json of smollm2 are from commands that have been removed; they name
# the commit that has them.
# On SmolLM2-135M-Instruct (make smollm2); the texts come by `python -m papers texts`. A killed study resumes.
for study in fixed-memory once beyond; do
  one docs/results/$study.json 120 "python -m evals study $study --out runs/$study --json docs/results/$study.json --plot docs/results/$study.png"
done
one docs/results/smollm2/choices.json 60 'python -m evals choices --model smollm2 --text debian-handbook --lengths 512 --samples 34 --policies '"'"'full,streaming,h2o+protect(recent=0.5),h2o+caote+protect(recent=0.5),tova,snapkv(kernel=13),snapkv(kernel=13)+caote,curdkv,curdkv+caote@model(cap=8.0)'"'"' --budgets 0.25,0.5 --when prompt --question known,unknown --json docs/results/smollm2/choices.json --plot docs/results/smollm2/choices.png'
one docs/results/smollm2/perplexity.json 20 'python -m evals perplexity --model smollm2 --text king-james-bible --chunk 1024 --stride 256 --sequences 16 --block 128 --policies '"'"'streaming,h2o+protect(recent=0.5),h2o+caote+protect(recent=0.5),tova,tova(heads='"'"'"'"'"'"'"'"'group'"'"'"'"'"'"'"'"')+caote,snapkv(kernel=13),snapkv(kernel=13)+caote,curdkv'"'"' --budgets 128,256 --when block,prompt --json docs/results/smollm2/perplexity.json --plot docs/results/smollm2/perplexity.png'
one docs/results/smollm2/perplexity-512.json 10 'python -m evals perplexity --model smollm2 --text debian-handbook --chunk 512 --stride 128 --sequences 16 --block 128 --policies "streaming,h2o+protect(recent=0.5),h2o+caote+protect(recent=0.5),tova,snapkv(kernel=13),snapkv(kernel=13)+caote,curdkv" --budgets 0.25 --when block,prompt --json docs/results/smollm2/perplexity-512.json --plot docs/results/smollm2/perplexity-512.png'
one docs/results/smollm2/perplexity-4096.json 20 'python -m evals perplexity --model smollm2 --text debian-handbook --chunk 4096 --stride 1024 --sequences 4 --block 128 --policies "streaming,h2o+protect(recent=0.5),h2o+caote+protect(recent=0.5),tova,snapkv(kernel=13),snapkv(kernel=13)+caote,curdkv" --budgets 0.25 --when block,prompt --json docs/results/smollm2/perplexity-4096.json --plot docs/results/smollm2/perplexity-4096.png'
one docs/results/smollm2/ruler.json 20 'python -m evals ruler --model smollm2 --tasks niah_single_1,niah_single_2,niah_multikey_1,niah_multikey_2,vt,fwe --lengths 1024 --samples 17 --policies "full,streaming,tova,snapkv(kernel=13),snapkv(kernel=13)+caote,laprox(kernel=13)@model(cap=8.0),curdkv" --budgets 0.25 --when prompt --batch 17 --json docs/results/smollm2/ruler.json --plot docs/results/smollm2/ruler.png'
one docs/results/smollm2/ruler-2048.json 45 'python -m evals ruler --model smollm2 --tasks niah_single_1,niah_single_2,niah_multikey_1,niah_multikey_2,vt,fwe --lengths 2048 --samples 17 --policies "full,streaming,tova,snapkv(kernel=13),snapkv(kernel=13)+caote,laprox(kernel=13)@model(cap=8.0),curdkv" --budgets 0.25 --when prompt --batch 17 --json docs/results/smollm2/ruler-2048.json --plot docs/results/smollm2/ruler-2048.png'
one docs/results/smollm2/ruler-pooling.json 10 'python -m evals ruler --model smollm2 --tasks niah_single_1,niah_single_2,niah_multikey_1,niah_multikey_2,vt,fwe --lengths 1024 --samples 17 --policies "full,snapkv,snapkv(kernel=7),snapkv(kernel=13),tova+caote" --budgets 0.25 --when prompt --evict-every 0 --batch 17 --json docs/results/smollm2/ruler-pooling.json --plot docs/results/smollm2/ruler-pooling.png'
one docs/results/smollm2/ruler-unknown.json 75 'python -m evals ruler --model smollm2 --tasks niah_single_1,niah_single_2,niah_multikey_1,niah_multikey_2,vt,fwe --lengths 1024,2048 --samples 17 --policies "full,streaming,tova,snapkv(kernel=13),snapkv(kernel=13)+caote,laprox(kernel=13)@model(cap=8.0),curdkv" --budgets 0.25 --when prompt --question unknown --batch 17 --json docs/results/smollm2/ruler-unknown.json --plot docs/results/smollm2/ruler-unknown.png'
one docs/results/smollm2/fidelity.json 12 'python -m evals fidelity --model smollm2 --policies "h2o+protect(recent=0.5),h2o+caote+protect(recent=0.5),tova(heads='"'"'group'"'"'),tova(heads='"'"'group'"'"')+caote,snapkv(kernel=13),snapkv(kernel=13)+caote,laprox(kernel=13,target='"'"'attention'"'"')@model,laprox(kernel=13)@model(cap=8.0),curdkv,curdkv+caote" --budgets 0.25 --samples 20 --when block,prompt --json docs/results/smollm2/fidelity.json --plot docs/results/smollm2/fidelity.png'
one docs/results/smollm2/fidelity-query.json 10 'python -m evals fidelity --model smollm2 --policies "snapkv(kernel=7),snapkv(kernel=7)+caote,snapkv(kernel=7)+caote(per='"'"'query'"'"'),dropkv" --budgets 0.25 --samples 10 --when prompt --question known,unknown --against "snapkv(kernel=7)+caote" --json docs/results/smollm2/fidelity-query.json'
one docs/results/smollm2/regret.json 20 'python -m evals regret --model smollm2 --recall docs/results/once.json --samples 1 --layers 6 --nodes 0 --exact 0 --out runs/regret --json docs/results/smollm2/regret.json --plot docs/results/smollm2/regret.png'
one docs/results/smollm2/regret-answers.json 5 'python -m evals regret --model smollm2-answers --recall docs/results/once.json --question known --samples 1 --layers 6 --nodes 0 --exact 0 --out runs/regret-answers --json docs/results/smollm2/regret-answers.json'
[ -f docs/results/smollm2/heads.npy ] || python -m models.calibrate smollm2 --text "${XDG_CACHE_HOME:-$HOME/.cache}/kvjax/texts/debian-handbook.txt" --rows 20 --length 512 --q-filters docs/results/smollm2/q-filters.npy --heads docs/results/smollm2/heads.npy || failed=1
one docs/results/smollm2/needle-long.json 65 'python -m evals needle --model smollm2 --policies "full,streaming,h2o+caote+protect(recent=0.5),tova,snapkv(kernel=13),snapkv(kernel=13)+caote,laprox(kernel=13)@model(cap=8.0),curdkv,curdkv+caote@model(cap=8.0)" --budgets 0.25 --lengths 2048,4096 --depths 5 --samples 4 --when prompt --question known,unknown --evict-every 0 --batch 5 --json docs/results/smollm2/needle-long.json --plot docs/results/smollm2/needle-long.png'
one docs/results/smollm2/butler-accuracy.json 4 'python -m papers butler accuracy --model smollm2 --text king-james-bible:held-out --chunk 512 --sequences 6 --json docs/results/smollm2/butler-accuracy.json'
one docs/results/smollm2/butler-accuracy-handbook.json 4 'python -m papers butler accuracy --model smollm2 --text debian-handbook --chunk 512 --sequences 4 --json docs/results/smollm2/butler-accuracy-handbook.json'
one docs/results/smollm2/butler-perplexity.json 10 'python -m evals perplexity --model smollm2 --text king-james-bible:held-out --chunk 256 --sequences 8 --select "oracle,butler,butler(group='"'"'max'"'"'),butler(group='"'"'mean'"'"'),butler(group='"'"'weights'"'"'),quest,h2o,snapkv,streaming,first_layer,previous_layer,random" --sparsity 0.3,0.5,0.7 --json docs/results/smollm2/butler-perplexity.json --plot docs/results/smollm2/butler-perplexity.png'
one docs/results/smollm2/finetune.json 15 'python -m train.finetune --model smollm2 --data king-james-bible --policy snapkv_tuned+caote --eval-policy full,snapkv_tuned+caote --budget 0.25 --block 128 --lora 8 --seq-len 512 --batch 4 --tokens 40960 --eval-rows 16 --eval-every 0 --out tuned --json > docs/results/smollm2/finetune.json'
one docs/results/smollm2/finetune-control.json 15 'python -m train.finetune --model smollm2 --data king-james-bible --policy full --eval-policy full,snapkv_tuned+caote --budget 0.25 --block 128 --lora 8 --seq-len 512 --batch 4 --tokens 40960 --eval-rows 16 --eval-every 0 --out control --json > docs/results/smollm2/finetune-control.json'
[ -f needles.jsonl ] || python - <<'P'
import json
import models
from evals import tasks
_, tokenizer = models.load("smollm2")
with open("needles.jsonl", "w") as file:
    for seed in range(400):
        sample = tasks.needle(seed, tokenizer, 480, facts=10, haystack="train")
        file.write(json.dumps({"prompt": sample.prompt, "answer": f" {sample.answer}"}) + "\n")
P
one docs/results/smollm2/finetune-answers.json 30 'python -m train.finetune --model smollm2 --data needles.jsonl --policy snapkv_tuned+caote --eval-policy full,snapkv_tuned+caote --budget 0.1 --when prompt --block 128 --lora 8 --lr 5e-4 --seq-len 512 --batch 4 --tokens 81920 --eval-rows 32 --eval-every 0 --log-every 1 --out tuned-answers --json > docs/results/smollm2/finetune-answers.json'
one docs/results/smollm2/finetune-answers-control.json 30 'python -m train.finetune --model smollm2 --data needles.jsonl --policy full --eval-policy full,snapkv_tuned+caote --budget 0.1 --when prompt --block 128 --lora 8 --lr 5e-4 --seq-len 512 --batch 4 --tokens 81920 --eval-rows 32 --eval-every 0 --log-every 1 --out control-answers --json > docs/results/smollm2/finetune-answers-control.json'
for run in answers answers-control; do
  folder=$([ $run = answers ] && echo tuned-answers || echo control-answers)
  one docs/results/smollm2/needle-$run.json 4 "python -m evals needle --model $folder --policies full,snapkv_tuned+caote --budgets 0.1 --lengths 512 --depths 5 --samples 20 --when prompt --evict-every 0 --batch 20 --json docs/results/smollm2/needle-$run.json"
done
for run in mixed attention prose code; do
  data=$([ $run = prose ] && echo king-james-bible || { [ $run = code ] && echo python-doc || echo king-james-bible python-doc; })
  [ -d butler-$run ] || python -m train.butler --model smollm2 --data $data --seq-len 1024 --batch 1 --tokens 200e3 --lr 2e-3 --eval-every 0 --eval-rows 4 $([ $run = attention ] && echo --source attention_input) --out butler-$run
  for text in king-james-bible:held-out python-doc:held-out debian-handbook; do
    one docs/results/smollm2/butler-variants/$run-${text%%:*}.json 2 "python -m papers butler accuracy --model smollm2 --networks butler-$run --text $text --chunk 512 --sequences 4 --select butler --json docs/results/smollm2/butler-variants/$run-${text%%:*}.json"
  done
done
# The gate of models/smollm2 is trained as its card says, and that of the adapted model here.
[ -d gate-answers ] || { python -m papers.answers.questions --tokenizer smollm2 --rows 300 --lengths 512 --seed 9 --out qa.jsonl &&
  python -m train.scorer --model smollm2-answers --network gate --data qa.jsonl debian-handbook king-james-bible --text-field prompt --tokens 31e3 --seq-len 512 --batch 1 --lr 5e-3 --out gate-answers; } || failed=1
one docs/results/smollm2/gate.json 20 'python -m evals needle --model smollm2 --policies "full,kvzip@model(normalise=False),zap+protect(sinks=4,recent=0.02)@model(normalise=False)" --budgets 0.25,0.5 --lengths 1024 --depths 5 --samples 6 --facts 10 --asked 5 --when block --evict-every 0 --question unknown --batch 20 --against "kvzip@model(normalise=False)" --seed 50000 --json docs/results/smollm2/gate.json'
one docs/results/smollm2/gate-answers.json 20 'python -m evals needle --model smollm2-answers --networks gate-answers --policies "full,kvzip@model(normalise=False),zap+protect(sinks=4,recent=0.02)@model(normalise=False)" --budgets 0.1,0.25,0.5 --lengths 1024 --depths 5 --samples 6 --facts 10 --asked 5 --when block --evict-every 0 --question unknown --batch 20 --against "kvzip@model(normalise=False)" --seed 50000 --json docs/results/smollm2/gate-answers.json'
one docs/results/smollm2/gate-ruler.json 15 'python -m evals ruler --model smollm2 --tasks niah_single_1,niah_multikey_1,vt --lengths 1024 --samples 12 --policies "full,snapkv,kvzip@model(normalise=False),zap+protect(sinks=4,recent=0.02)@model(normalise=False)" --budgets 0.25 --when block --evict-every 0 --question unknown --batch 12 --against "kvzip@model(normalise=False)" --json docs/results/smollm2/gate-ruler.json'
[ -d scorer ] || python -m train.scorer --model smollm2 --data king-james-bible python-doc debian-handbook --target kvzip --tokens 300e3 --seq-len 512 --batch 4 --out scorer
one docs/results/smollm2/scorer.json 45 'python -m evals needle --model smollm2 --networks scorer --policies "full,snapkv(kernel=13),expected_attention,keydiff,kvzip@model(normalise=False),zap,zap+caote,zap@model(normalise=False),zap+caote@model(normalise=False)" --budgets 0.25,0.5 --lengths 512 --depths 5 --samples 20 --when prompt --evict-every 0 --question unknown --batch 20 --json docs/results/smollm2/scorer.json'
one docs/results/smollm2/butler-choices.json 40 'python -m papers butler choices --model smollm2 --text king-james-bible:held-out --chunk 256 --sequences 16 --select full,oracle,butler,quest,streaming,random --sparsity 0.3,0.5,0.7 --json docs/results/smollm2/butler-choices.json --plot docs/results/smollm2/butler-choices.png'
one docs/results/smollm2/butler-agreement.json 0.2 'python -m papers butler agreement --model smollm2 --text king-james-bible:held-out --chunk 256 --sequences 16 --json docs/results/smollm2/butler-agreement.json --plot docs/results/smollm2/butler-agreement.png'
one docs/results/smollm2/butler-pages.json 6 'python -m papers butler accuracy --import papers.tokenbutler.two_levels --model smollm2 --text king-james-bible:held-out --chunk 512 --sequences 6 --select "butler,two_levels(pages=0.2),two_levels(pages=0.4),two_levels(pages=0.2,by='"'"'max'"'"'),quest" --sparsity 0.9 --json docs/results/smollm2/butler-pages.json'
one docs/results/smollm2/rounding.json 8 'python -m papers rounding --model smollm2 --text king-james-bible debian-handbook --chunk 512 --sequences 6 --json docs/results/smollm2/rounding.json'
one docs/results/smollm2/coref.json 20 'python -m evals coref --model smollm2 --select full,oracle,butler,quest,h2o,snapkv,streaming,first_layer,previous_layer,random --sparsity 0.3,0.5,0.7 --samples 20 --json docs/results/smollm2/coref.json --plot docs/results/smollm2/coref.png'
# On the embedded model.
one docs/results/butler-agreement.json 0.2 'python -m papers butler agreement --json docs/results/butler-agreement.json --plot docs/results/butler-agreement.png'
one docs/results/memory.json 2.0 'python -m benchmarks memory --json docs/results/memory.json --page docs/results/memory.md'
one docs/results/fidelity-heads.json 2.4 'python -m evals fidelity --policies '"'"'laprox(window=8)@model(cap=8.0),laprox(window=8)@layer,snapkv(window=8,kernel=7)@adakv,snapkv(window=8,kernel=7)@pyramid,cake(window=8,kernel=7)@cake,lava(window=8)@lava'"'"' --budgets 51 --samples 40 --when prompt --json docs/results/fidelity-heads.json --heads docs/results/fidelity-heads.png'
one docs/results/coref-generated.json 2.5 'python -m evals coref --mode generate --select full,oracle,butler,quest,h2o,streaming,random --sparsity 0.5 --json docs/results/coref-generated.json'
one docs/results/butler-layers.json 3.6 'python -m papers butler layers --json docs/results/butler-layers.json --plot docs/results/butler-layers.png'
one docs/results/butler-accuracy.json 3.8 'python -m papers butler accuracy --json docs/results/butler-accuracy.json'
one docs/results/butler-flops.json 4.0 'python -m papers flops --json docs/results/butler-flops.json --plot docs/results/butler-flops.png --page docs/results/butler-flops.md'
one docs/results/butler-oracles.json 4.7 'python -m papers butler oracles --json docs/results/butler-oracles.json --plot docs/results/butler-oracles.png'
one docs/results/fidelity.json 5.1 'python -m evals fidelity --policies '"'"'h2o+protect(recent=0.5),h2o+caote+protect(recent=0.5),tova,tova+caote,snapkv(window=8,kernel=7),snapkv(window=8,kernel=7)+caote,laprox(window=8,target='"'"'"'"'"'"'"'"'attention'"'"'"'"'"'"'"'"')@model,laprox(window=8)@model(cap=8.0)'"'"' --budgets 128 --samples 40 --when block,prompt --json docs/results/fidelity.json --plot docs/results/fidelity.png'
one docs/results/perplexity-policies.json 7.6 'python -m evals perplexity --policies '"'"'streaming,h2o,h2o+caote,h2o+protect(recent=0.5),h2o+caote+protect(recent=0.5),tova,tova+caote,snapkv(window=8,kernel=7),snapkv(window=8,kernel=7)+caote'"'"' --budgets 64,128,256 --block 32 --json docs/results/perplexity-policies.json --plot docs/results/perplexity-policies.png'
one docs/results/perplexity.json 8.9 'python -m evals perplexity --select oracle,butler,quest,h2o,snapkv,streaming,random --sparsity 0,0.3,0.5,0.7 --json docs/results/perplexity.json --plot docs/results/perplexity.png'
one docs/results/coref.json 34.9 'python -m evals coref --select full,oracle,butler,quest,h2o,snapkv,streaming,random --sparsity 0.3,0.5,0.7 --json docs/results/coref.json --plot docs/results/coref.png'
one docs/results/needle.json 97.7 'python -m evals needle --policies '"'"'full,streaming,h2o,h2o+caote,h2o+fast_caote,h2o+protect(recent=0.5),h2o+caote+protect(recent=0.5),h2o+caote(group='"'"'"'"'"'"'"'"'mean'"'"'"'"'"'"'"'"')+protect(recent=0.5),h2o+fast_caote+protect(recent=0.5),tova,tova+caote,tova+fast_caote,snapkv,snapkv+caote,snapkv+caote(group='"'"'"'"'"'"'"'"'mean'"'"'"'"'"'"'"'"'),snapkv+fast_caote'"'"' --budgets 128,256,512 --batch 8 --json docs/results/needle.json --plot docs/results/needle.png'
if [ "${1:-}" = benchmarks ]; then
  one benchmarks/results/sharing.json 25 'python -m benchmarks sharing --json'
  one docs/results/selection.json 3 'python -m papers selection --contexts 512,2048 --repetitions 15 --json docs/results/selection.json'
  one benchmarks/results/soak.json 20 'python -m benchmarks soak --kills 0 --json --plot docs/images/soak.png'
  one benchmarks/results/soak_kills.json 4 'python -m benchmarks soak --tokens 0 --requests 0 --json benchmarks/results/soak_kills.json'
  one benchmarks/results/tpu_compile.json 30 'python -m benchmarks tpu_compile --json'
  one benchmarks/results/peers.json 20 'python -m benchmarks peers --json'
  one benchmarks/results/cpu.json 40 'python -m benchmarks cpu --json'
  python -m benchmarks report
fi
python docs/tables.py && python docs/tables.py --check
exit $failed
