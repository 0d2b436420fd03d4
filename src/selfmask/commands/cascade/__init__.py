"""`cascade`: a dispatcher, a router and experts, trained stage by stage."""
