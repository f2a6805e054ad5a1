"""The one way from decisions to figures: contenders, their journeys, the replay, prices and metrics."""
