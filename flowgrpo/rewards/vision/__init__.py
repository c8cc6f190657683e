"""Rewards over images, and a drawing task.

Modules:

    boxes    Rewards over images: boxes, points and counts that an answer names, and how well an image and a text agree
    drawing  Drawing what is described: a vision task that works offline, from `make_drawings` to `drawing_reward`
"""
