"""Methods that move the weights along the path of training, and targets that extrapolate beyond the teacher."""
