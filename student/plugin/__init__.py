"""What every plug-in of the loop derives from: terms, controllers, strategies and the rounds that strategies see."""
