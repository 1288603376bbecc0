"""Methods that move the weights along the path of training."""
