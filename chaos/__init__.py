"""Fault injection: a plan of faults, a run under that plan, and the audit of what the run left. The product does not import it."""
