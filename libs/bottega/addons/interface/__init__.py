"""What services and the add-ons that they load agree on."""
