"""The world files of the experiments; `opd tiny build FILE` builds one."""
