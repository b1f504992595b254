"""The interfaces between services and the add-ons that they load."""
