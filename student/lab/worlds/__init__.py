"""The worlds of the experiments, a file each; `opd tiny build FILE` builds one."""
