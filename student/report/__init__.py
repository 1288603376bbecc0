"""What a run tells: metrics, samples, spans, and the pages made from them."""
