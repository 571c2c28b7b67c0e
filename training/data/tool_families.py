"""Families of tools: what they are called, what they take, how one asks for them, what comes back and how one says it.

A parameter is (type, description, values): values are words to choose from, or "int LOW HIGH". A parameter whose name ends with ? is
optional: it is given only when the question names it.
"""

from __future__ import annotations

from dataclasses import dataclass

CITIES = tuple(
    "Paris Berlin Rome London Madrid Oslo Vienna Tokyo Cairo Lima Boston Chicago Toronto Sydney Prague Athens Dublin Warsaw Lisbon Helsinki Delhi Seoul Nairobi Denver Miami Zurich "
    "Munich Milan Lyon Porto Quito Havana Accra Dakar Manila Hanoi Kyoto Osaka Perth Austin Seattle Geneva Bergen Malmo Bristol Leeds York Cardiff Turin Naples".split()
)
NAMES = tuple(
    "Anna Ben Clara David Emma Felix Greta Hugo Ida Jack Kate Leo Mia Noah Olga Paul Rosa Sam Tina Victor Wendy Yusuf Zoe Alice Carlos Diana Elena Frank Grace Ivan Julia Karl".split()
)
ITEMS = (
    "milk",
    "bread",
    "eggs",
    "apples",
    "rice",
    "tea",
    "coffee",
    "sugar",
    "soap",
    "paper",
    "batteries",
    "a lamp",
    "a chair",
    "shoes",
    "a book",
    "a pen",
    "flowers",
    "a blanket",
    "honey",
    "olive oil",
)
TASKS = (
    "call the dentist",
    "water the plants",
    "buy milk",
    "send the report",
    "feed the cat",
    "pay the rent",
    "book a table",
    "clean the kitchen",
    "write to Anna",
    "pick up the parcel",
    "go for a run",
    "charge the phone",
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday", "today", "tomorrow")
TIMES = (
    "7:00",
    "7:30",
    "8:00",
    "8:15",
    "9:00",
    "9:45",
    "10:30",
    "11:00",
    "12:00",
    "13:30",
    "14:00",
    "15:15",
    "16:00",
    "17:30",
    "18:00",
    "19:00",
    "20:00",
    "21:30",
)
SONGS = (
    "Moon River",
    "Blue Sky",
    "Silent Night",
    "Yesterday Morning",
    "Golden Fields",
    "Rainy Day",
    "Little Star",
    "Long Road",
    "Winter Song",
    "Dancing Leaves",
)
TOPICS = (
    "jazz",
    "penguins",
    "volcanoes",
    "the moon",
    "old clocks",
    "whales",
    "bread baking",
    "chess",
    "solar power",
    "Roman history",
    "black holes",
    "gardening",
    "cheese",
    "trains",
    "poetry",
    "bees",
)
WORDS = (
    "house",
    "water",
    "friend",
    "thank you",
    "good morning",
    "bread",
    "school",
    "tree",
    "book",
    "where is the station",
    "I am hungry",
    "see you soon",
    "how much is it",
    "music",
    "summer",
)
LANGUAGES = ("French", "German", "Spanish", "Italian", "Portuguese", "Dutch", "Japanese", "Swedish", "Polish", "Turkish")
ROOMS = ("kitchen", "bedroom", "living room", "bathroom", "hall", "office", "garage", "garden")
COMPANIES = ("Acme", "Globex", "Initech", "Umbra", "Northwind", "Contoso", "Redwood", "Bluebird", "Sunrise", "Ironworks")
CURRENCIES = ("euros", "dollars", "pounds", "yen", "francs", "pesos", "rupees")
NUMBER = "int 1 500"


@dataclass(frozen=True)
class Family:
    """One kind of tool. `asks` without an optional parameter's mark are used without it."""

    names: tuple[str, ...]
    texts: tuple[str, ...]
    parameters: dict[str, tuple[str, str, tuple[str, ...] | str]]
    asks: tuple[str, ...]
    result: dict[str, tuple[str, ...] | str]
    answers: tuple[str, ...]


def _family(
    names: str,
    texts: str,
    parameters: dict[str, tuple[str, str, tuple[str, ...] | str]],
    asks: str,
    result: dict[str, tuple[str, ...] | str],
    answers: str,
) -> Family:
    return Family(
        tuple(names.split()),
        tuple(texts.split(" | ")),
        parameters,
        tuple(asks.split(" | ")),
        result,
        tuple(answers.split(" | ")),
    )


_CONDITIONS = ("sunny", "rainy", "cloudy", "windy", "foggy", "snowy", "clear")
FAMILIES: dict[str, Family] = {
    "weather": _family(
        "get_weather weather current_weather fetch_weather lookup_weather getWeather weather_now weather_info city_weather show_weather",
        "Get the current weather in a city. | The weather of a place. | Look up the weather for a city. | Current weather and temperature.",
        {"city": ("string", "The city", CITIES), "unit?": ("string", "Unit of the temperature", ("celsius", "fahrenheit"))},
        "What is the weather in {city}? | How is the weather in {city}? | Is it raining in {city}? | What's the weather like in {city}? | Tell me the weather in {city}. | Do I need an umbrella in {city}? | "
        "How warm is it in {city}? | Weather in {city} in {unit}, please. | What is the temperature in {city} in {unit}?",
        {"condition": _CONDITIONS, "temperature": "int -5 35"},
        "It is {condition} in {city}, with {temperature} degrees. | In {city} it is {temperature} degrees and {condition}. | The weather in {city} is {condition} at {temperature} degrees.",
    ),
    "forecast": _family(
        "get_forecast forecast weather_forecast fetch_forecast getForecast",
        "Weather forecast for a city on a day. | How the weather will be. | Forecast of the weather.",
        {"city": ("string", "The city", CITIES), "day": ("string", "The day", DAYS)},
        "Will it rain in {city} on {day}? | What will the weather be in {city} on {day}? | Forecast for {city} on {day}? | How will the weather be in {city} on {day}?",
        {"condition": _CONDITIONS, "high": "int 0 35"},
        "On {day} it will be {condition} in {city}, with up to {high} degrees. | The forecast for {city} on {day}: {condition}, {high} degrees.",
    ),
    "time": _family(
        "get_time current_time time_in clock world_clock getTime local_time what_time",
        "The current time in a city. | Get the local time of a place. | Tells the time.",
        {"city": ("string", "The city", CITIES)},
        "What time is it in {city}? | What is the time in {city}? | Tell me the time in {city}. | How late is it in {city}? | Local time in {city}, please.",
        {"time": TIMES},
        "It is {time} in {city}. | The time in {city} is {time}. | In {city} it is {time} now.",
    ),
    "calculator": _family(
        "calculate calculator add_numbers math compute evaluate calc do_math",
        "Calculate with two numbers. | A calculator for two numbers. | Does arithmetic.",
        {
            "a": ("integer", "First number", NUMBER),
            "b": ("integer", "Second number", NUMBER),
            "operation": ("string", "What to do", ("add", "subtract", "multiply", "divide")),
        },
        "Use the calculator to {operation} {a} and {b}. | Please {operation} {a} and {b}. | {operation} {a} and {b} for me. | I need to {operation} {a} and {b}.",
        {"result": "int 1 900"},
        "The result is {result}. | It is {result}.",
    ),
    "alarm": _family(
        "set_alarm alarm create_alarm new_alarm setAlarm wake_up add_alarm",
        "Set an alarm. | Create an alarm for a time. | Wakes the user.",
        {
            "time": ("string", "When it rings", TIMES),
            "label?": ("string", "A name for it", ("work", "school", "gym", "medicine", "train")),
        },
        "Set an alarm for {time}. | Wake me up at {time}. | Please set an alarm at {time}. | I need an alarm for {time}. | Can you wake me at {time}? | Set an alarm for {time} called {label}.",
        {"status": ("set", "ok", "done")},
        "Your alarm is set for {time}. | Done: the alarm rings at {time}. | I have set an alarm for {time}.",
    ),
    "timer": _family(
        "start_timer set_timer timer countdown startTimer new_timer kitchen_timer",
        "Start a timer. | A countdown in minutes. | Start a kitchen timer.",
        {"minutes": ("integer", "How many minutes", "int 1 90")},
        "Start a timer for {minutes} minutes. | Set a timer of {minutes} minutes. | Timer for {minutes} minutes, please. | Count down {minutes} minutes. | Remind me when {minutes} minutes are over.",
        {"status": ("started", "ok", "running")},
        "The timer runs for {minutes} minutes. | I have started a timer for {minutes} minutes. | Your timer of {minutes} minutes is running.",
    ),
    "reminder": _family(
        "add_reminder remind create_reminder set_reminder remind_me newReminder",
        "Create a reminder. | Remind the user of something. | Add a reminder for a day.",
        {"text": ("string", "What to remember", TASKS), "day": ("string", "The day", DAYS)},
        "Remind me to {text} on {day}. | Please remind me on {day} to {text}. | I must {text} on {day}, please remind me. | Set a reminder for {day}: {text}.",
        {"status": ("saved", "ok", "created")},
        "I will remind you on {day} to {text}. | Your reminder is saved: {text} on {day}. | Done, I will remind you to {text}.",
    ),
    "email": _family(
        "send_email email mail_to write_email sendEmail send_mail",
        "Send an email. | Write an email to somebody. | Sends a message by email.",
        {"to": ("string", "Who gets it", NAMES), "subject": ("string", "The subject", TASKS)},
        "Send an email to {to} about this: {subject}. | Email {to} with the subject {subject}. | Write an email to {to}: {subject}. | Please mail {to} about {subject}.",
        {"status": ("sent", "ok", "delivered")},
        "I have sent the email to {to}. | The email to {to} is sent. | Done! {to} has got your email.",
    ),
    "message": _family(
        "send_message text message_to send_text sendMessage chat_with send_sms",
        "Send a text message. | Sends a short message to a person. | Write to somebody.",
        {
            "name": ("string", "Who gets it", NAMES),
            "text": (
                "string",
                "The message",
                (
                    "I am late",
                    "see you soon",
                    "happy birthday",
                    "I am at home",
                    "good night",
                    "call me back",
                    "dinner is ready",
                    "thank you",
                ),
            ),
        },
        "Send {name} a message: {text}. | Text {name} that {text}. | Write to {name}: {text}. | Tell {name}: {text}. | Please message {name} with {text}.",
        {"status": ("sent", "ok")},
        "Your message to {name} is sent. | I have told {name}: {text}. | Done, {name} has your message.",
    ),
    "call": _family(
        "call_person phone_call dial make_call callContact ring",
        "Call somebody by phone. | Start a phone call. | Dials a contact.",
        {"name": ("string", "The person", NAMES)},
        "Call {name}. | Please call {name}. | Can you phone {name}? | Ring {name} for me. | I want to talk to {name} on the phone.",
        {"status": ("calling", "connected")},
        "I am calling {name}. | The call to {name} has started. | Calling {name} now.",
    ),
    "translate": _family(
        "translate translate_text translator to_language translateText convert_language",
        "Translate a text. | Translates words into another language. | A translator.",
        {"text": ("string", "The text", WORDS), "language": ("string", "The target language", LANGUAGES)},
        'Translate "{text}" into {language}. | How do you say {text} in {language}? Use the translator. | Please translate {text} to {language}. | What is "{text}" in {language}? Please translate it.',
        {
            "translation": (
                "maison",
                "Wasser",
                "amigo",
                "grazie",
                "bom dia",
                "brood",
                "skola",
                "drzewo",
                "livre",
                "Musik",
                "verano",
            )
        },
        'In {language}, it is "{translation}". | The translation is "{translation}". | "{text}" in {language} is "{translation}".',
    ),
    "search": _family(
        "search_web web_search search find_online searchWeb lookup internet_search query_web",
        "Search the web. | Find pages about a topic. | Looks something up on the internet.",
        {"query": ("string", "What to look for", TOPICS), "limit?": ("integer", "How many results", "int 1 10")},
        "Search the web for {query}. | Find something about {query} online. | Look up {query} on the internet. | Please search for {query}. | Show me {limit} results about {query}. | Can you look for {query} on the web?",
        {"title": ("A short guide", "All you need to know", "The history of it", "Facts and pictures", "An introduction")},
        'I found a page called "{title}" about {query}. | There is a page about {query}: "{title}". | The first result is "{title}".',
    ),
    "music": _family(
        "play_music play_song music start_song playMusic player",
        "Play a song. | Starts music. | Plays a piece of music.",
        {"song": ("string", "The song", SONGS), "volume?": ("integer", "How loud, from 1 to 10", "int 1 10")},
        'Play {song}. | Please play the song {song}. | I want to hear {song}. | Put on {song}. | Play {song} at volume {volume}. | Can you play "{song}"?',
        {"status": ("playing", "ok")},
        "Now playing {song}. | I am playing {song}. | Here is {song}.",
    ),
    "light": _family(
        "set_light light switch_light turn_light lights lightControl lamp_control",
        "Switch a light on or off. | Controls the lights in a room. | Turn lamps on or off.",
        {"room": ("string", "The room", ROOMS), "state": ("string", "On or off", ("on", "off"))},
        "Turn {state} the light in the {room}. | Switch the {room} light {state}. | Please turn the light in the {room} {state}. | Light {state} in the {room}, please. | Can you turn the {room} light {state}?",
        {"status": ("ok", "done")},
        "The light in the {room} is {state} now. | I turned the {room} light {state}. | Done: {room} light {state}.",
    ),
    "heating": _family(
        "set_temperature heating thermostat set_heating setTemperature warm_room",
        "Set the temperature of a room. | Controls the heating. | A thermostat.",
        {"room": ("string", "The room", ROOMS), "degrees": ("integer", "Degrees Celsius", "int 15 26")},
        "Set the {room} to {degrees} degrees. | Make the {room} {degrees} degrees warm. | Heat the {room} to {degrees} degrees. | I want {degrees} degrees in the {room}.",
        {"status": ("ok", "set")},
        "The {room} is set to {degrees} degrees. | I have set the {room} to {degrees} degrees. | Done, {degrees} degrees in the {room}.",
    ),
    "shopping": _family(
        "add_to_cart buy shopping_list add_item addToCart order_item put_on_list",
        "Add something to the shopping list. | Puts an item into the cart. | Order an item.",
        {"item": ("string", "What to add", ITEMS), "quantity?": ("integer", "How many", "int 2 12")},
        "Add {item} to my shopping list. | Put {item} on the list. | I need {item}, please add it to the list. | Please order {item}. | Add {item} to my cart, {quantity} times. | Put {quantity} times {item} on the list.",
        {"status": ("added", "ok")},
        "I have added {item}. | {item} is on your list now. | Done, I added {item} to the list.",
    ),
    "stock": _family(
        "get_stock_price stock_price stock quote share_price getStock ticker",
        "The price of a share. | Get the stock price of a company. | Looks up a stock.",
        {"company": ("string", "The company", COMPANIES)},
        "What is the stock price of {company}? | How much is a share of {company}? | Price of {company} shares? | Tell me the share price of {company}.",
        {"price": "int 5 400"},
        "A share of {company} costs {price} dollars. | The price of {company} is {price} dollars. | {company} is at {price} dollars.",
    ),
    "currency": _family(
        "convert_currency exchange currency money_converter convertMoney change_money",
        "Convert money. | Changes an amount into another currency. | A currency converter.",
        {
            "amount": ("integer", "How much", NUMBER),
            "source": ("string", "From which currency", CURRENCIES),
            "target": ("string", "To which currency", CURRENCIES),
        },
        "How much are {amount} {source} in {target}? | Convert {amount} {source} to {target}. | Change {amount} {source} into {target}. | What are {amount} {source} worth in {target}?",
        {"value": "int 1 900"},
        "{amount} {source} are {value} {target}. | That is {value} {target}. | You get {value} {target} for {amount} {source}.",
    ),
    "route": _family(
        "get_route route directions navigate find_route getDirections way_to",
        "The way from one city to another. | Find a route. | Directions between two places.",
        {
            "start": ("string", "Where it starts", CITIES),
            "end": ("string", "Where it ends", CITIES),
            "mode?": ("string", "How to travel", ("car", "train", "bike")),
        },
        "How do I get from {start} to {end}? | Show me the way from {start} to {end}. | Find a route from {start} to {end}. | Route from {start} to {end} by {mode}, please. | I want to go from {start} to {end} by {mode}.",
        {"hours": "int 1 20", "kilometres": "int 50 900"},
        "From {start} to {end} it is {kilometres} kilometres, about {hours} hours. | The way from {start} to {end} takes {hours} hours. | It is {kilometres} kilometres to {end}.",
    ),
    "flight": _family(
        "find_flight search_flights flights book_flight findFlight flight_search",
        "Find a flight. | Search flights between two cities on a day. | Looks for flights.",
        {
            "origin": ("string", "From where", CITIES),
            "destination": ("string", "To where", CITIES),
            "day": ("string", "The day", DAYS),
        },
        "Find a flight from {origin} to {destination} on {day}. | I want to fly from {origin} to {destination} on {day}. | Are there flights from {origin} to {destination} on {day}? | Flights from {origin} to {destination} on {day}, please.",
        {"departure": TIMES, "price": "int 40 900"},
        "There is a flight from {origin} to {destination} at {departure} for {price} dollars. | A flight leaves {origin} at {departure} and costs {price} dollars.",
    ),
    "hotel": _family(
        "book_hotel find_hotel hotel reserve_room bookHotel hotel_search",
        "Book a hotel. | Find a room in a city. | Reserves a hotel room.",
        {"city": ("string", "The city", CITIES), "nights": ("integer", "How many nights", "int 1 14")},
        "Book a hotel in {city} for {nights} nights. | I need a room in {city} for {nights} nights. | Find a hotel in {city} for {nights} nights. | Reserve a hotel room in {city}, {nights} nights.",
        {"hotel": ("Hotel Central", "Park Inn", "Sea View", "The Old Mill", "Golden Lion"), "price": "int 50 300"},
        "I booked {hotel} in {city} for {nights} nights, at {price} dollars. | {hotel} in {city} has a room for {price} dollars. | You have a room in {hotel}.",
    ),
    "table": _family(
        "book_table reserve_table restaurant reservation bookTable table_for",
        "Book a table in a restaurant. | Reserve a table. | Makes a reservation.",
        {"people": ("integer", "How many people", "int 1 12"), "time": ("string", "When", TIMES)},
        "Book a table for {people} at {time}. | I want a table for {people} people at {time}. | Reserve a table at {time} for {people} people. | A table for {people} at {time}, please.",
        {"status": ("booked", "confirmed", "ok")},
        "Your table for {people} at {time} is booked. | The table for {people} people is reserved at {time}.",
    ),
    "event": _family(
        "create_event add_event calendar schedule_meeting createEvent plan_meeting",
        "Add an event to the calendar. | Plan a meeting. | Creates an appointment.",
        {
            "title": (
                "string",
                "What it is",
                ("lunch", "a meeting", "a party", "football", "the dentist", "a concert", "piano lesson", "dinner"),
            ),
            "day": ("string", "The day", DAYS),
            "time": ("string", "When", TIMES),
        },
        "Add {title} on {day} at {time} to my calendar. | Plan {title} on {day} at {time}. | I have {title} on {day} at {time}, please note it. | Put {title} into the calendar: {day} at {time}.",
        {"status": ("created", "ok", "saved")},
        "I have put {title} into your calendar: {day} at {time}. | Done: {title} on {day} at {time}. | Your event is saved.",
    ),
    "note": _family(
        "save_note note take_note write_note saveNote new_note memo",
        "Save a note. | Write something down. | Keeps a short text.",
        {"text": ("string", "The text", TASKS)},
        "Write down: {text}. | Take a note: {text}. | Please save this note: {text}. | Note that I must {text}. | Make a note: {text}.",
        {"status": ("saved", "ok")},
        "I have saved your note. | Noted: {text}. | Your note is saved: {text}.",
    ),
    "population": _family(
        "get_population population city_size inhabitants getPopulation people_in",
        "How many people live in a city. | The population of a place. | Number of inhabitants.",
        {"city": ("string", "The city", CITIES)},
        "How many people live in {city}? | What is the population of {city}? | How big is {city}? | Tell me the population of {city}.",
        {"people": "int 20000 900000"},
        "{people} people live in {city}. | The population of {city} is {people}. | {city} has {people} inhabitants.",
    ),
    "dice": _family(
        "roll_dice dice throw_dice random_number rollDice roll",
        "Roll dice. | Throws dice with some sides. | A random number.",
        {"sides": ("integer", "Sides of a die", "int 4 20"), "count?": ("integer", "How many dice", "int 2 6")},
        "Roll a die with {sides} sides. | Throw a {sides} sided die. | Please roll a die of {sides} sides. | Roll {count} dice with {sides} sides.",
        {"value": "int 1 20"},
        "You rolled a {value}. | The result is {value}. | It is a {value}.",
    ),
    "recipe": _family(
        "find_recipe recipe get_recipe cook recipe_search recipeFor",
        "Find a recipe. | Recipes for a dish. | How to cook something.",
        {
            "dish": (
                "string",
                "The dish",
                (
                    "pancakes",
                    "tomato soup",
                    "apple pie",
                    "rice with beans",
                    "bread",
                    "lentil curry",
                    "potato salad",
                    "pizza",
                    "lasagne",
                    "omelette",
                ),
            )
        },
        "Find a recipe for {dish}. | I want to cook {dish}. Find a recipe, please. | Show me a recipe for {dish}. | Look up how to cook {dish}.",
        {"minutes": "int 10 90", "title": ("Easy version", "Classic style", "Grandmother's way", "For beginners")},
        'There is a recipe for {dish}: "{title}", {minutes} minutes. | I found "{title}" for {dish}. It takes {minutes} minutes.',
    ),
    "book": _family(
        "find_book search_books library book_info findBook catalogue",
        "Find a book. | Look in the library's catalogue. | Searches books by topic.",
        {"topic": ("string", "What it is about", TOPICS)},
        "Find a book about {topic}. | I am looking for a book on {topic}. | Does the library have books about {topic}? | Search the catalogue for {topic}.",
        {
            "title": ("A Little History", "The Complete Guide", "First Steps", "Stories and Facts", "The Handbook"),
            "shelf": "int 1 60",
        },
        'There is "{title}" about {topic} on shelf {shelf}. | I found "{title}". It is on shelf {shelf}.',
    ),
    "train": _family(
        "next_train train_times trains timetable nextTrain departures",
        "The next train to a city. | Train times. | When trains leave.",
        {"destination": ("string", "Where it goes", CITIES)},
        "When does the next train to {destination} leave? | When is the next train to {destination}? | Train to {destination}, when? | I must take the train to {destination}. When does it leave?",
        {"departure": TIMES, "platform": "int 1 20"},
        "The next train to {destination} leaves at {departure} from platform {platform}. | It leaves at {departure}, platform {platform}.",
    ),
    "door": _family(
        "lock_door door unlock front_door lockDoor gate",
        "Lock or unlock the door. | Controls a door. | Opens and closes the lock.",
        {"action": ("string", "What to do", ("lock", "unlock"))},
        "Please {action} the door. | Can you {action} the front door? | {action} the door. | I want you to {action} the house.",
        {"status": ("ok", "done")},
        "Done, I did {action} the door. | The door: {action} is done.",
    ),
    "contact": _family(
        "get_contact find_contact phone_number contact address_book lookupContact",
        "Find the phone number of a person. | Looks in the address book. | A contact's number.",
        {"name": ("string", "The person", NAMES)},
        "What is the phone number of {name}? | Find the number of {name}. | Give me {name}'s phone number. | Look up {name} in my contacts.",
        {"number": "int 100000 999999"},
        "The number of {name} is {number}. | {name} has the number {number}. | You can reach {name} at {number}.",
    ),
    "order": _family(
        "order_status track_order track package getOrder where_is_order",
        "The status of an order. | Track a parcel by its number. | Where an order is.",
        {"order_id": ("integer", "Number of the order", "int 1000 9999")},
        "Where is my order {order_id}? | What is the status of order {order_id}? | Track order {order_id}. | Has order number {order_id} been sent?",
        {"status": ("on its way", "delivered", "being packed", "delayed")},
        "Your order {order_id} is {status}. | Order {order_id} is {status}.",
    ),
}
