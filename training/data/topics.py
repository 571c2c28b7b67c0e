"""Lists of things to talk about, from which prompts are made."""

from __future__ import annotations


def _list(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.replace("\n", " ").split(",") if item.strip())


ANIMALS = _list("""
a cat, a dog, a horse, a cow, a pig, a sheep, a goat, a chicken, a duck, a goose, a rabbit, a mouse, a rat, a fox, a wolf, a bear,
a lion, a tiger, a leopard, an elephant, a giraffe, a zebra, a hippo, a rhino, a monkey, a gorilla, a kangaroo, a koala, a panda,
a camel, a deer, a moose, a squirrel, a beaver, a hedgehog, a bat, an owl, an eagle, a hawk, a crow, a sparrow, a swan, a penguin,
a parrot, a peacock, an ostrich, a flamingo, a frog, a toad, a snake, a lizard, a turtle, a crocodile, a shark, a whale, a dolphin,
an octopus, a squid, a crab, a lobster, a jellyfish, a starfish, a salmon, a goldfish, a seahorse, a bee, a wasp, an ant, a spider,
a butterfly, a moth, a beetle, a ladybug, a mosquito, a fly, a dragonfly, a snail, a worm, a scorpion, a seal, an otter, a raccoon
""")
THINGS = _list("""
a bicycle, a car, a train, a bus, a ship, an airplane, a helicopter, a rocket, a bridge, a tunnel, a lighthouse, a castle, a house,
a tent, a library, a museum, a school, a hospital, a market, a bakery, a restaurant, a garden, a park, a farm, a factory, a bank,
a clock, a watch, a calendar, a map, a compass, a telescope, a microscope, a camera, a mirror, a window, a door, a key, a lock,
a table, a chair, a bed, a lamp, a candle, a pencil, a pen, a book, a newspaper, a letter, a dictionary, a computer, a keyboard,
a phone, a radio, a television, a battery, a magnet, a robot, a hammer, a saw, a screwdriver, a ladder, a wheel, an engine, a spring,
a pulley, a lever, a thermometer, a ruler, a scale, a knife, a spoon, a fork, a plate, a cup, a kettle, an oven, a refrigerator,
a washing machine, an umbrella, a coat, a hat, a shoe, a scarf, a ring, a necklace, a violin, a guitar, a piano, a drum, a flute,
a trumpet, a painting, a statue, a ball, a kite, a puzzle, a chessboard, a pillow, a blanket, a broom, a rope, a basket, a bottle
""")
NATURE = _list("""
rain, snow, wind, thunder, lightning, fog, a rainbow, a cloud, a storm, a tornado, a hurricane, an earthquake, a volcano, a mountain,
a valley, a river, a lake, an ocean, a beach, an island, a desert, a forest, a jungle, a swamp, a waterfall, a glacier, a cave,
the sun, the moon, a star, a planet, a comet, a galaxy, a black hole, an eclipse, the sky, the air, water, ice, steam, fire, smoke,
sand, soil, a rock, gold, silver, iron, copper, a diamond, salt, coal, oil, a tree, a leaf, a flower, a rose, a sunflower, grass,
a seed, a root, a mushroom, moss, bamboo, a cactus, an oak tree, a pine tree, spring, summer, autumn, winter, the night, the dawn
""")
FOODS = _list("""
bread, butter, cheese, milk, yogurt, an egg, rice, pasta, soup, salad, pizza, a sandwich, a hamburger, sushi, curry, chocolate, honey,
sugar, salt, pepper, an apple, a banana, an orange, a lemon, a grape, a strawberry, a cherry, a peach, a pear, a melon, a pineapple,
a mango, a coconut, a tomato, a potato, a carrot, an onion, garlic, a pumpkin, a cucumber, spinach, beans, peas, corn, nuts, tea,
coffee, juice, lemonade, hot chocolate, ice cream, cake, a cookie, a pancake, jam, vinegar, olive oil, cinnamon, ginger, vanilla
""")
IDEAS = _list("""
gravity, light, sound, heat, energy, electricity, magnetism, time, space, speed, weight, an atom, a molecule, a cell, DNA, a gene,
evolution, photosynthesis, oxygen, carbon dioxide, the heart, the brain, the lungs, the stomach, blood, bones, muscles, skin, the eye,
the ear, sleep, dreams, memory, a habit, happiness, sadness, anger, fear, courage, kindness, honesty, patience, friendship, love, trust,
respect, freedom, justice, peace, democracy, a law, a vote, a government, money, a tax, trade, a job, a salary, a budget, a loan,
insurance, history, geography, mathematics, geometry, algebra, a fraction, a percentage, a triangle, a circle, a square, physics,
chemistry, biology, astronomy, medicine, a vaccine, a virus, bacteria, a vitamin, exercise, music, rhythm, a melody, art, poetry,
a novel, a fairy tale, a joke, a proverb, a language, grammar, a verb, a noun, an alphabet, the internet, a website, an email,
a password, software, a programming language, an algorithm, artificial intelligence, a database, a search engine, recycling, pollution,
climate, solar power, wind power, a holiday, a birthday, a tradition, a festival, a game, chess, football, swimming, running, yoga
""")
JOBS = _list("""
a teacher, a doctor, a nurse, a farmer, a baker, a cook, a pilot, a sailor, a firefighter, a police officer, a judge, a lawyer,
a carpenter, a plumber, an electrician, an engineer, a scientist, an astronaut, a painter, a musician, a writer, a poet, an actor,
a dancer, a librarian, a gardener, a tailor, a shoemaker, a mechanic, a driver, a postman, a waiter, a barber, a dentist, a vet,
a photographer, a journalist, a translator, an architect, a programmer, a fisherman, a shepherd, a beekeeper, a clockmaker
""")
ACTIVITIES = _list("""
learn to swim, learn to cook, learn a new language, learn to play the guitar, learn to draw, read more books, sleep better, wake up
earlier, drink more water, eat healthier food, save money, make new friends, stay calm before an exam, be more patient, get more
exercise, start running, write a letter, write a diary, plant a tree, grow tomatoes, take care of a cat, take care of a dog, clean my
room, pack a suitcase, plan a trip, make a cup of tea, boil an egg, bake bread, make pancakes, make a salad, cook rice, wash a sweater,
fix a flat tire, change a light bulb, remember names, study for a test, give a speech, write a poem, tell a good story, say sorry to a
friend, thank my teacher, cheer up a sad friend, spend less time on my phone, make a paper plane, fly a kite, ride a bicycle, find a
hobby, organise my desk, keep plants alive, choose a good book, improve my handwriting, relax in the evening, stop worrying
""")
EVENTS = _list("""
I went for a long walk today, I just finished a good book, I am learning to bake bread, I feel a bit tired today, I have an exam
tomorrow, I lost my keys this morning, I got a new puppy, my cat is sleeping on my lap, it is raining here, it is very hot today,
I cooked dinner for my family, I am planning a trip to the sea, I started a new job, I moved to a new city, I miss my old friends,
I had a strange dream last night, my brother is visiting me, my garden is full of flowers, I am learning the piano, I won a game of
chess, I watched a funny movie, I am bored, I am happy today, I am a little sad, I am nervous about a speech, I made a mistake at work,
my grandmother told me a story, I saw a rainbow, I heard an owl last night, I want to buy a bicycle, I cannot sleep, I ate too much
cake, I forgot my umbrella, my train was late, I found a coin on the street, I painted my room blue, I planted a tree, I am going to
a wedding, today is my birthday, I have a day off, I am writing a story, I like quiet mornings, I love the sea, I am afraid of spiders,
I broke my favourite cup, my phone is broken, I ran five kilometres, I learned a new word, my friend is ill, I made new friends
""")
HEROES = _list("""
a brave mouse, a lazy cat, a kind giant, a lost puppy, a curious fox, a shy dragon, a little robot, an old clockmaker, a young sailor,
a clever crow, a hungry bear, a singing frog, a tiny ant, a lonely star, a small boat, a wise owl, a girl named Mia, a boy named Tom,
a baker, a painter, a farmer, a king who could not sleep, a queen who loved books, a snowman, a paper plane, a red balloon, a blind
musician, a shepherd, a librarian, a tired knight, a talking tree, a magic key, a stubborn donkey, a rabbit who was always late
""")
PLACES = _list("""
in a dark forest, by the sea, on a high mountain, in a quiet village, in a big city, in an old castle, on a small island, in a library,
at a night market, in a garden, on the moon, in the desert, at a train station, in a kitchen, under a bridge, during a storm,
on a winter night, on the first day of spring, at a lighthouse, in a toy shop
""")
FINDS = _list("""
a golden key, a map, an old letter, a lost child, a new friend, a secret door, a bright stone, a forgotten song, a small seed, a broken
clock, a cup of tea, a lantern, a blue feather, a strange sound, a sleeping dragon, a warm light, a kind stranger, a silver coin
""")
GROUPS = _list("""
fruits, vegetables, farm animals, wild animals, birds, insects, fish, trees, flowers, colours, musical instruments, sports, jobs, tools,
countries, cities, rivers, oceans, planets, metals, languages, school subjects, kitchen objects, pieces of furniture, clothes, hot drinks,
cold drinks, desserts, board games, means of transport, months, seasons, parts of the body, feelings, shapes, hobbies, things in a garden,
things made of glass, things made of wood, things that fly, things that are cold, things that are round, famous scientists, famous painters,
famous composers, good habits, polite phrases, things to pack for a trip, things you find at a beach, things in a classroom
""")
PAIRS = _list("""
tea or coffee, cats or dogs, summer or winter, the sea or the mountains, books or movies, the city or the countryside, trains or planes,
apples or oranges, mornings or evenings, rain or snow, running or swimming, pens or pencils, sweet or salty food, rice or pasta,
walking or cycling, letters or emails, a big party or a quiet dinner, the sun or the moon, chess or cards, gold or silver
""")
DIFFERENCES = _list("""
a frog and a toad, a crocodile and an alligator, a moth and a butterfly, weather and climate, a planet and a star, a comet and an asteroid,
speed and velocity, heat and temperature, a fruit and a vegetable, a simile and a metaphor, a noun and a verb, a virus and bacteria,
a lake and a sea, a hill and a mountain, a river and a stream, a ship and a boat, a violin and a cello, a novel and a poem, tea and coffee,
jam and honey, butter and margarine, a hare and a rabbit, a dolphin and a fish, a bat and a bird, a square and a rectangle, mass and weight,
an atom and a molecule, rain and hail, fog and mist, a doctor and a nurse, a city and a village, a lawyer and a judge, hardware and software
""")
QUESTIONS = tuple(
    line.strip()
    for line in """
Why is the sky blue?
Why is the grass green?
Why do leaves fall in autumn?
Why does the moon change its shape?
Why do we have day and night?
Why do we have seasons?
Why is the sea salty?
Why does ice float on water?
Why do cats purr?
Why do dogs wag their tails?
Why do birds sing?
Why do birds fly south in winter?
Why do bees make honey?
Why do spiders build webs?
Why do we dream?
Why do we sleep?
Why do we yawn?
Why do we sneeze?
Why do we laugh?
Why do people cry?
Why do we need water?
Why is exercise good for you?
Why should we read books?
Why do people like music?
Why do stars twinkle?
Why is the sunset red?
Why does metal feel cold?
Why does bread rise?
Why does an onion make you cry?
Why do magnets attract iron?
Why do balloons float?
Why do we hear thunder after lightning?
Why do airplanes fly?
Why do ships float?
Why is honesty important?
Why do people celebrate birthdays?
Why do we brush our teeth?
Why do we wear seat belts?
Why are vegetables healthy?
Why do cats have whiskers?
Why do zebras have stripes?
Why do camels have humps?
Why do polar bears have white fur?
Why do owls hunt at night?
Why is the desert cold at night?
Why do mirrors reflect light?
Why do we have two ears?
Why do we need friends?
Why do people travel?
Why do people keep diaries?
How do plants make food?
How do fish breathe?
How do birds build nests?
How do bees find flowers?
How does a rainbow form?
How does rain form?
How does a volcano erupt?
How does a bicycle stay upright?
How does a refrigerator keep food cold?
How does a clock work?
How does a camera work?
How does a telescope work?
How does the heart work?
How does the ear work?
How does soap clean?
How does a plane stay in the air?
How does a seed grow?
How does a caterpillar become a butterfly?
How does the internet work?
How does a computer store data?
How does a battery work?
How does a kettle boil water?
How is paper made?
How is glass made?
How is cheese made?
How is chocolate made?
How is salt made?
How is bread made?
How are mountains formed?
How are stars born?
How far away is the moon?
How big is the sun?
How long does a cat live?
How many hours should I sleep?
How do I say no politely?
How do I start a conversation?
How do I keep a secret?
How do I make a good first impression?
How do I stop being nervous?
How do I learn faster?
What makes a good friend?
What makes people happy?
What makes a good teacher?
What should I eat for breakfast?
What should I do on a rainy day?
What should I do when I am bored?
What should I do if I am lost?
What should I do if I cannot sleep?
What is a good present for my mother?
What is a good name for a cat?
What is a good name for a dog?
What can I cook with eggs?
What can I cook with potatoes?
What can I plant in a small garden?
What do cats eat?
What do rabbits eat?
What do bears do in winter?
What do astronauts eat?
What do bees do all day?
What happens when water freezes?
What happens when water boils?
What happens if I do not sleep?
What happens during an eclipse?
What happens when we breathe?
What would happen without the sun?
What is inside the earth?
What is the sun made of?
What is the moon made of?
What is glass made of?
What is bread made of?
What is the best way to learn?
What is the purpose of a library?
What is the smallest bird?
What is the fastest animal on land?
What is the tallest animal?
What is the biggest animal?
Where do penguins live?
Where do kangaroos live?
Where does chocolate come from?
Where does wool come from?
Where does honey come from?
Where does coffee come from?
Where does rain come from?
When do flowers bloom?
When do we use an umbrella?
When should I water my plants?
Who invented the telephone?
Who invented the light bulb?
Who invented the printing press?
Who was the first person on the moon?
Who discovered penicillin?
Who was Albert Einstein?
Who was Isaac Newton?
Who was Marie Curie?
Who was Charles Darwin?
Who was Leonardo da Vinci?
Who was William Shakespeare?
Who was Mozart?
Who was Beethoven?
Who was Cleopatra?
Who was Galileo?
Who was Mahatma Gandhi?
Who was Nelson Mandela?
Who was Vincent van Gogh?
Who was Pablo Picasso?
Who was Jane Austen?
Who was Charles Dickens?
Who was Mark Twain?
Who was Ada Lovelace?
Who was Alan Turing?
Who was Aristotle?
Who was Socrates?
Who was Napoleon?
Who was Abraham Lincoln?
Who was Christopher Columbus?
Who was Neil Armstrong?
Can fish sleep?
Can plants feel pain?
Can penguins fly?
Can you see the Great Wall from space?
Is a tomato a fruit?
Is the earth round?
Is a whale a fish?
Is it healthy to drink coffee?
Is chess a sport?
Is the sun a star?
Are spiders insects?
Are bats blind?
Are robots alive?
Do trees sleep?
Do fish drink water?
Do all birds fly?
Does the moon have air?
Does sugar make you tired?
""".strip().splitlines()
)
