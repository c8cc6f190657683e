"""Rewards over images, and a drawing task.

Modules:

    boxes    Rewards over images: boxes, points and counts in an answer, and image-text scores
    drawing  Drawing from a description: an offline vision task, from `make_drawings` to `drawing_reward`
"""
