"""ControlNets: networks that steer a picture by an image of edges, depth or the like."""
