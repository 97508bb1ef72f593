"""One step of K-FAC: evaluate, validate, estimate, propose, commit [MG15 §9]."""
