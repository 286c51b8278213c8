#!/bin/bash
# Check allhands on this Mac, and write one file with the results, to be attached to an issue.
#
#   bash scripts/mac_check.sh            everything, 20 to 40 minutes
#   bash scripts/mac_check.sh --small    few steps, about 5 minutes
#
# Works with the bash 3.2 and the BSD tools of macOS. A part that fails or takes too long does not stop
# the others. The file has facts about the system and versions, but no names of people and computers,
# no addresses and no tokens. Under Linux the script runs, too, so that it can be tested.
# shellcheck disable=SC2317,SC2329 # the function `part` calls the functions that it is given
set -u

ISSUES="https://github.com/allhands-mlx/allhands/issues/new?template=bug.yml"
PARTS="install facts versions doctor model answer gradient ranks pipeline resume speed demo"
usage() {
  cat <<TEXT
usage: bash scripts/mac_check.sh [OPTIONS]
  --small          few steps
  --parts "A B"    only these parts: $PARTS,
                   or tests (unit and parity tests of a checkout, an hour); "model" fetches what most need
  --model DIR      a model directory in place of the demo model
  --data DIR       a data directory in place of the demo data
  --allhands FILE  the command to check; default: .venv/bin/allhands here, then the one of PATH
  --limit SECONDS  time for everything; default: 5400
  --out FILE       the report; default: mac-check-DATE-TIME.txt in this directory
TEXT
}

root=$(cd "$(dirname "$0")/.." && pwd)
iters=60 layers=8 demo_iters=60 total=5400 model="" data="" allhands="" out="" small=0
while [ $# -gt 0 ]; do
  case $1 in
    --small) small=1 iters=8 layers=2 demo_iters=4; shift; continue ;;
    -h | --help) usage; exit 0 ;;
    --parts | --model | --data | --allhands | --limit | --out) ;;
    *) echo "mac_check: unknown option: $1" >&2; usage >&2; exit 2 ;;
  esac
  [ $# -ge 2 ] || { echo "mac_check: $1 needs a value" >&2; exit 2; }
  case $1 in
    --parts) PARTS=$2 ;;
    --model) model=$2 ;;
    --data) data=$2 ;;
    --allhands) allhands=$2 ;;
    --limit) total=$2 ;;
    --out) out=$2 ;;
  esac
  shift 2
done
case $total in '' | *[!0-9]*) echo "mac_check: --limit needs whole seconds" >&2; exit 2 ;; esac
out=${out:-mac-check-$(date +%Y%m%d-%H%M%S).txt}
: >"$out" || exit 2
temporary=${TMPDIR:-/tmp}
work=$(mktemp -d "${temporary%/}/mac-check.XXXXXX") || exit 2
on_mac=no
[ "$(uname -s)" = Darwin ] && on_mac=yes

# --- what is private ------------------------------------------------------------------------------

# Names of people and computers, a line each; with what takes their place.
private_names() {
  printf '%s\n' "$work|WORK" "$root|CHECKOUT" "${HOME:-/nowhere}|~"
  for token in "${HF_TOKEN:-}" "${HUGGING_FACE_HUB_TOKEN:-}" "${WANDB_API_KEY:-}"; do
    [ -n "$token" ] && printf '%s|TOKEN\n' "$token"
  done
  if [ "$on_mac" = yes ]; then
    printf '%s|NAME\n' "$(id -F 2>/dev/null)"
    printf '%s|HOST\n' "$(scutil --get ComputerName 2>/dev/null)" "$(scutil --get LocalHostName 2>/dev/null)"
  fi
  printf '%s|HOST\n' "$(hostname 2>/dev/null)" "$(hostname 2>/dev/null | cut -d. -f1)" "$(uname -n)"
  printf '%s|USER\n' "$(id -un)" "${USER:-}" "${LOGNAME:-}"
}
private_names >"$work/private"

# Print standard input without private data. Names are replaced as whole words, because a short name
# may be part of a word.
escape=$(printf '\033')
without_private() {
  # Bytes: BSD tools refuse what is no whole character.
  LC_ALL=C awk '
    function replaced(text, name, as,    done, at, before, after) {
      done = ""
      while ((at = index(tolower(text), tolower(name))) > 0) {
        before = substr(done substr(text, 1, at - 1), length(done) + at - 1, 1)
        after = substr(text, at + length(name), 1)
        if (name ~ /^[A-Za-z0-9_]/ && before ~ /[A-Za-z0-9_]/ || after ~ /[A-Za-z0-9_]/)
          done = done substr(text, 1, at + length(name) - 1)
        else
          done = done substr(text, 1, at - 1) as
        text = substr(text, at + length(name))
      }
      return done text
    }
    FNR == NR {
      at = index($0, "|")
      if (at > 2) { count++; names[count] = substr($0, 1, at - 1); as[count] = substr($0, at + 1) }
      next
    }
    { line = $0; for (i = 1; i <= count; i++) line = replaced(line, names[i], as[i]); print line }
  ' "$work/private" - | LC_ALL=C sed -E \
    -e "s/$escape\[[0-9;]*m//g" \
    -e 's#(/Users|/home)/[^/ :"]+#\1/USER#g' \
    -e 's#(/private)?/var/folders/[^ :"]*/T#TMP#g' \
    -e 's/[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+/USER@HOST/g' \
    -e 's/([0-9A-Fa-f]{1,2}:){5}[0-9A-Fa-f]{1,2}/ADDRESS/g' \
    -e 's/[0-9A-Fa-f]{1,4}(:[0-9A-Fa-f]{1,4}){4,7}/ADDRESS/g' \
    -e 's/([0-9A-Fa-f]{1,4}:)+:[0-9A-Fa-f:]*(%[a-z0-9]+)?/ADDRESS/g' \
    -e 's/([0-9]{1,3}\.){3}[0-9]{1,3}/ADDRESS/g' \
    -e 's/(hf|sk|ghp|gho|glpat|xoxb)[-_][A-Za-z0-9_-]{8,}/TOKEN/g' \
    -e 's/((token|TOKEN|secret|SECRET|password|PASSWORD|api_key|API_KEY)[=:] ?)[^ ,]+/\1HIDDEN/g'
}

# Logs are read as text.
export NO_COLOR=1 TERM=dumb

say() { printf '%s\n' "$@" | without_private >>"$out"; }

# --- parts ----------------------------------------------------------------------------------------

good=0 bad=0 job="" stopped=0
end_job() {
  [ -n "$job" ] || return 0
  kill -TERM -- "-$job" 2>/dev/null
  for _ in 1 2 3 4 5 6 7 8 9 10; do kill -0 -- "-$job" 2>/dev/null || break; sleep 1; done
  kill -KILL -- "-$job" 2>/dev/null
}
finish() {
  rm -rf "$work"
  echo "attach the report to an issue: $ISSUES"
  echo "mac_check: $good of $((good + bad)) parts succeeded, the report is $out"
  [ $bad = 0 ]
  exit
}
# The part that runs is ended, and the others are left out.
trap 'stopped=1; end_job' INT TERM HUP

# part NAME SECONDS COMMAND...: run it, with its time limit, if it was asked for.
part() {
  name=$1 limit=$2
  shift 2
  case " $PARTS " in *" $name "*) ;; *) return 0 ;; esac
  left=$((total - SECONDS))
  [ "$limit" -le $left ] || limit=$left
  if [ $stopped = 1 ] || [ "$limit" -le 0 ]; then
    bad=$((bad + 1))
    say "" "== $name: left out, because $([ $stopped = 1 ] && echo it was stopped || echo the time is over)"
    return 0
  fi
  printf '%s ... ' "$name"
  begun=$SECONDS late=0
  # A process group of its own, which can be ended as a whole.
  set -m
  "$@" >"$work/output" 2>&1 </dev/null &
  job=$!
  set +m
  while kill -0 "$job" 2>/dev/null; do
    if [ $((SECONDS - begun)) -ge "$limit" ]; then late=1; end_job; break; fi
    sleep 1
  done
  wait "$job" 2>/dev/null
  code=$?
  job=""
  took=$((SECONDS - begun))
  if [ $stopped = 1 ]; then result="stopped after $took s"
  elif [ $late = 1 ]; then result="FAILED: not done after $took s"
  elif [ $code != 0 ]; then result="FAILED with code $code after $took s"
  else result="done in $took s"; fi
  echo "$result"
  say ""
  say "== $name: $result"
  # What went well needs few lines; facts, versions and results are short.
  lines=25
  case $result in done*) good=$((good + 1)) ;; *) bad=$((bad + 1)); lines=60 ;; esac
  tail -n $lines "$work/output" | LC_ALL=C cut -c 1-300 | without_private >>"$out"
}

install() {
  if [ -x "$root/.venv/bin/allhands" ]; then echo "installed already"; else make -C "$root" install; fi
}

fact() { # NAME COMMAND...: the first line that it prints
  label=$1
  shift
  printf '%s: %s\n' "$label" "$("$@" 2>/dev/null | head -n 1)"
}
facts() {
  fact system uname -srm
  if [ "$on_mac" = yes ]; then
    fact macOS sw_vers -productVersion
    fact build sw_vers -buildVersion
    for key in hw.model machdep.cpu.brand_string hw.memsize hw.physicalcpu hw.perflevel0.physicalcpu \
      hw.perflevel1.physicalcpu iogpu.wired_limit_mb vm.loadavg; do
      fact "$key" sysctl -n "$key"
    done
    fact power pmset -g batt
    pmset -g | grep -i lowpowermode
    fact "command line tools" xcode-select -p
  else
    echo "this is no Mac: the results only show that the script works"
    fact cores getconf _NPROCESSORS_ONLN
  fi
  df -k . | awk 'NR == 2 { printf "free disk: %d MB\n", $4 / 1024 }'
  "$python" - <<'PYTHON'
import mlx.core as mx
print("device:", mx.default_device(), "Metal:", mx.metal.is_available())
for key, value in mx.device_info().items():
    print(f"{key}: {value}")
PYTHON
}

versions() {
  "$allhands" version && "$allhands" env && "$python" - <<'PYTHON'
import importlib.metadata as metadata
import sys
print("python", sys.version.split()[0])
for name in ("mlx", "mlx-metal", "mlx-lm", "numpy", "transformers", "tokenizers", "psutil", "pydantic"):
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        pass
PYTHON
}

doctor() { "$allhands" cluster check --hosts localhost; }

fetch() {
  [ -d "$model" ] || "$allhands" model get demo --out "$model" || return
  [ -d "$data" ] || "$allhands" data demo --out "$data"
}

answer() { "$allhands" generate --model "$model" --prompt "How do I make tea?" --max-tokens 20; }

gradient() { "$allhands" model check "$model" --data "$data"; }

# train NAME OPTIONS...: the same training each time.
train() {
  run=$work/$1
  shift
  "$allhands" train --model "$model" --data "$data" --batch-size 8 --num-layers "$layers" --iters "$iters" \
    --val-batches 2 --steps-per-report 2 --adapter-path "$run" ${1+"$@"}
}

# alike ONE TWO: the largest difference of the losses of two runs; an error if they are others.
alike() {
  "$python" - "$work/$1/metrics.jsonl" "$work/$2/metrics.jsonl" <<'PYTHON'
import json
import sys
runs = []
for path in sys.argv[1:]:
    events = [json.loads(line) for line in open(path, encoding="utf-8")]
    reports = [event for event in events if event["event"] in ("train", "valid")]
    runs.append({(event["event"], event["step"]): event["loss"] for event in reports})
both = runs[0].keys() & runs[1].keys()
assert both, "no report at the same step"
gap = max(abs(runs[0][key] - runs[1][key]) for key in both)
print(f"{len(both)} reports, largest difference of the losses: {gap:.3g}")
sys.exit(gap > 0.05)
PYTHON
}

ranks() { train one && train two -n 2 --backend ring && alike one two; }

pipeline() {
  [ -f "$work/one/metrics.jsonl" ] || train one || return
  train stages -n 2 --backend ring --strategy pipeline && alike one stages
}

resume() {
  [ -f "$work/one/metrics.jsonl" ] || train one || return
  rm -rf "$work/again"
  ALLHANDS_TRAINING=$iters
  half=$((iters / 2))
  iters=$half
  train again || return
  iters=$ALLHANDS_TRAINING
  train again --resume && alike one again
}

# median FILE KEY: the median of a figure in a file of JSON lines, without the first report.
median() {
  sed -nE "s/.*\"$2\": ([0-9.]+).*/\1/p" "$1" | sed 1d | sort -n |
    awk '{ values[NR] = $1 } END { if (!NR) exit 1; print values[int((NR + 1) / 2)] }'
}
# Tokens a second as each program reports them, in turn, because a Mac becomes warm.
speed() {
  for round in 1 2; do
    rm -rf "$work/theirs.jsonl" "$work/ours"
    BENCHMARK_RECORD=$work/theirs.jsonl PYTHONPATH=$root/benchmarks/recorder${PYTHONPATH:+:$PYTHONPATH} \
      "$(dirname "$allhands")/mlx_lm.lora" --train --model "$model" --data "$data" --batch-size 8 \
      --num-layers "$layers" --iters "$iters" --steps-per-report 2 --steps-per-eval 100000 --val-batches 1 \
      --adapter-path "$work/theirs" --report-to wandb --project-name check >"$work/said" 2>&1 ||
      { cat "$work/said"; return 1; }
    train ours --steps-per-eval 100000 >"$work/said" 2>&1 || { cat "$work/said"; return 1; }
    theirs=$(median "$work/theirs.jsonl" tokens_per_second) &&
      ours=$(median "$work/ours/metrics.jsonl" tokens_per_s) || return 1
    echo "round $round, tokens/s: allhands $ours, mlx_lm $theirs"
  done
  sed -nE 's/.*"peak_memory": ([0-9.]+).*/mlx_lm: peak \1 GB/p' "$work/theirs.jsonl" | tail -n 1
  sed -nE 's/.*(peak [0-9.]+ [MG]B).*/allhands: \1/p' "$work/said" | tail -n 1
}

tests() { make -C "$root" test TESTS="-m 'not long and not gpu' tests/unit tests/parity"; }

demo() { "$allhands" demo --out "$work/demo" --iters "$demo_iters" && cat "$work/demo/times.md"; }

# --- all of them ----------------------------------------------------------------------------------

say "mac_check of allhands, $(date -u +%Y-%m-%dT%H:%M:%SZ), small: $small"
if [ -z "$allhands" ]; then
  [ -x "$root/.venv/bin/allhands" ] || command -v allhands >/dev/null || part install 1200 install
  allhands=$root/.venv/bin/allhands
  [ -x "$allhands" ] || allhands=$(command -v allhands)
fi
if [ ! -x "$allhands" ]; then
  echo "mac_check: there is no allhands: make install" >&2
  say "there is no allhands"
  bad=$((bad + 1))
  finish
fi
python=$(dirname "$allhands")/python
model=${model:-$work/model}
data=${data:-$work/data}
part facts 60 facts
part versions 120 versions
part doctor 120 doctor
part model 900 fetch
part answer 300 answer
part gradient 300 gradient
part ranks 900 ranks
part pipeline 600 pipeline
part resume 900 resume
part speed 1200 speed
part demo 1800 demo
part tests 5400 tests
say ""
say "$good of $((good + bad)) parts succeeded"
finish
