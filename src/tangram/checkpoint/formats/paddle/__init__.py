"""PaddlePaddle's flex checkpoints."""
