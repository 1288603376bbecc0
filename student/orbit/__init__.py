"""ORBIT: one student with several thinking budgets, and the merge of checkpoints that its fusion starts from."""
