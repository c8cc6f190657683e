"""What reasoning-gym's verifiers say, as a program of its own; it runs in a process that is killed at its deadline."""


def verify(name: str, options: dict, index: int, answer: str) -> float:
    """How right an answer to a generated task is, from 0 to 1; the task is made again from its seed."""
    import reasoning_gym

    made = reasoning_gym.create_dataset(name, **options)
    entry = made[index]
    try:
        return float(made.score_answer(answer=answer, entry=entry))
    except Exception:  # a verifier that an answer breaks was not convinced by it
        return 0.0
