#!/usr/bin/env bash
# Plans a question as it is and as it was before a pull request, and comments the difference (see action.yml).
#
# Environment: SLO, TRACE (or empty), PLAN_ARGUMENTS, BASE_SHA, PULL_REQUEST, GITHUB_REPOSITORY, GH_TOKEN,
# FAIL_ON_INFEASIBLE. Writes to GITHUB_OUTPUT and GITHUB_STEP_SUMMARY where they are set. Exit codes: those of
# `plan` on the new question, but 0 where a plan was written or, with FAIL_ON_INFEASIBLE=false, none is possible.
set -euo pipefail
: "${SLO:?}" "${BASE_SHA:?needs a pull_request event}" "${PULL_REQUEST:?}" "${GITHUB_REPOSITORY:?}"
trace=${TRACE:-}
read -ra arguments <<<"${PLAN_ARGUMENTS:-}"
folder=$(mktemp -d)
trap 'git worktree remove --force "$folder/base" 2>/dev/null || true; rm -rf "$folder"' EXIT
output() { printf '%s\n' "$1" >>"${GITHUB_OUTPUT:-/dev/null}"; }

fork=$(git merge-base "$BASE_SHA" HEAD)
if git diff --quiet "$fork" HEAD -- "$SLO" ${trace:+"$trace"}; then
  echo "$SLO has not changed: nothing to plan"
  output changed=false
  exit 0
fi
output changed=true
git worktree add --quiet --detach "$folder/base" "$fork"

plan_in() {  # plan_in ROOT NAME: plans the question of a checkout into $folder/NAME; what was printed in NAME.txt
  local root=$1 name=$2
  (cd "$root" && plan --slo "$SLO" ${trace:+--trace "$trace"} "${arguments[@]}" --quiet -o "$folder/$name") \
    >"$folder/$name.txt" 2>"$folder/$name.errors"
}
before=0 after=0
if [ -e "$folder/base/$SLO" ]; then plan_in "$folder/base" before || before=$?; else before=none; fi
plan_in . after || after=$?

has_plan() { [ -e "$folder/$1/plan.yaml" ]; }
quote() {  # quote FILE...: in a block that no backtick within can end
  printf '````text\n'
  cat "$@"
  printf '````\n'
}
marker="<!-- fleetplan $SLO -->"
report=${RUNNER_TEMP:-$folder}/fleetplan-report.md
{
  printf '%s\n### Plan of %s\n\n' "$marker" "\`$SLO\`"
  if has_plan after && has_plan before; then
    plan compare --markdown --fleet "before=$folder/before/plan.yaml" --fleet "after=$folder/after/plan.yaml" \
      --slo "$SLO" ${trace:+--trace "$trace"} 2>"$folder/compare.errors" || quote "$folder/compare.errors"
    printf '\nBoth on the traffic and the SLO of this pull request.\n'
  elif has_plan after && [ "$before" != none ]; then
    printf 'Before there was no plan (exit code %s).\n' "$before"
  elif ! has_plan after; then
    printf '**No fleet was planned** (exit code %s):\n\n' "$after"
    quote "$folder/after.errors"
  fi
  if has_plan after; then
    printf '\n<details><summary>The plan</summary>\n\n'
    sed '/^written to /,$d' "$folder/after.txt" >"$folder/screen.txt"  # paths of this machine
    quote "$folder/screen.txt"
    printf '\n</details>\n'
  fi
  printf '\n<details><summary>What changed in %s</summary>\n\n````diff\n' "$SLO"
  git diff "$fork" HEAD -- "$SLO" | tail -n +5 | head -c 20000
  printf '````\n\n</details>\n'
} >"$report"
output "report=$report"
cat "$report" >>"${GITHUB_STEP_SUMMARY:-/dev/stdout}"

# One comment per question, which is written anew. A token of a fork may only read: the summary has the report.
comments="repos/$GITHUB_REPOSITORY/issues/$PULL_REQUEST/comments"
comment() {
  local id
  id=$(gh api "$comments" --paginate --jq ".[] | select(.body | startswith(\"$marker\")) | .id") || return 1
  id=${id%%$'\n'*}
  if [ -n "$id" ]; then
    gh api --silent --method PATCH "repos/$GITHUB_REPOSITORY/issues/comments/$id" -F "body=@$report"
  else
    gh api --silent --method POST "$comments" -F "body=@$report"
  fi
}
comment || echo "::warning::no comment was written: the token needs pull-requests: write"

case $after in
  0 | 4) exit 0 ;;  # 4: a plan that is less than was asked for, as its first screen says
  3) if [ "${FAIL_ON_INFEASIBLE:-true}" = true ]; then exit 3; fi ;;
  *) exit "$after" ;;
esac
