"""From a model and a workload to a plan: what one sequence costs, and how many fit."""
