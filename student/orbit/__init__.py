"""ORBIT trains one student with several thinking budgets; the package also has the checkpoint merge that it uses."""
