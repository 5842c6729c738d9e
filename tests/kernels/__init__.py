"""What every backend computes, against the reference in float64."""
