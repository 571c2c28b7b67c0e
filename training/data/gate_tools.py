"""Names of the tools of the tool tests, by family. `check_overlap.py` shows that no training chat holds one of them."""

from __future__ import annotations

TEST_NAMES: dict[str, str] = {
    "weather": "read_sky_report climate_probe", "time": "tell_hour zone_clock", "calculator": "number_cruncher sum_machine", "alarm": "morning_bell ring_at",
    "timer": "sandglass egg_clock", "reminder": "nudge_later keep_in_mind", "email": "post_electronic compose_mail", "message": "drop_line whisper_to", "call": "telephone_now reach_out",
    "translate": "word_bridge speak_foreign", "search": "crawl_pages explore_net", "music": "jukebox tune_up", "light": "glow_switch bulb_set", "heating": "cosy_level warm_up_room",
    "shopping": "basket_add grocery_put", "stock": "market_peek equity_value", "currency": "coin_swap fx_rate", "route": "path_planner trip_lines", "hotel": "lodging_reserve bed_finder",
    "table": "dine_reserve seat_booking", "event": "agenda_insert diary_entry", "note": "jot_down scribble", "population": "head_count census_of", "dice": "toss_cubes chance_cube",
    "recipe": "dish_ideas kitchen_guide", "book": "shelf_search volume_finder", "train": "rail_board platform_info", "contact": "people_directory number_of", "order": "parcel_trace shipment_state",
    "flight": "air_search sky_ticket",
}  # fmt: skip
